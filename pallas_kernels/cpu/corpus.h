// Finished answers in which drafts are looked up: the arrays of a corpus, as jaxserve/features/speculation/corpus.py has them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace jaxserve {

constexpr uint32_t kBase = 0x9E3779B1;  // of the polynomial that is an n-gram's hash

inline uint32_t Mix(uint32_t state) {  // every bit counts: the finalizer of MurmurHash3
  state = (state ^ (state >> 16)) * 0x85EBCA6B;
  state = (state ^ (state >> 13)) * 0xC2B2AE35;
  return state ^ (state >> 16);
}

// A ring of tokens, and tables of where their n-grams ended.
struct Corpus {
  const int32_t* levels;  // lengths of n-grams, ascending
  int32_t *tokens, *ends;
  uint32_t *salts, *row_salts;
  int64_t num_levels, num_buckets, ways, ring;
  int64_t oldest;  // the first position that counts

  // The ways of an n-gram's bucket, by its polynomial.
  int32_t* FindBucket(int64_t level, uint32_t polynomial, const uint32_t* salt) const {
    int64_t bucket = Mix(Mix(polynomial ^ salt[0]) ^ salt[1]) & (num_buckets - 1);
    return ends + (level * num_buckets + bucket) * ways;
  }
};

enum { kLevels, kTokens, kSalts, kEnds, kOldest, kRowSalts, kNumCorpusArgs };

// Reads the arrays of a corpus, the first of which is argument `first`; returns what is wrong, or null.
inline const char* ReadCorpus(const XLA_FFI_CallFrame* frame, int first, Corpus& corpus) {
  for (int i = 0; i < kNumCorpusArgs; ++i) {
    XLA_FFI_DataType wanted = i == kSalts || i == kRowSalts ? XLA_FFI_DataType_U32 : XLA_FFI_DataType_S32;
    if (Argument(frame, first + i).dtype != wanted) return "salts must be uint32, and all else int32";
  }
  auto ints = [&](int i) { return static_cast<int32_t*>(Argument(frame, first + i).data); };
  auto size = [&](int i, int axis) { return Argument(frame, first + i).dims[axis]; };
  corpus.levels = ints(kLevels), corpus.num_levels = size(kLevels, 0);
  corpus.tokens = ints(kTokens), corpus.ring = size(kTokens, 0);
  corpus.ends = ints(kEnds), corpus.num_buckets = size(kEnds, 1), corpus.ways = size(kEnds, 2);
  corpus.oldest = std::max(*ints(kOldest), 0);
  corpus.salts = static_cast<uint32_t*>(Argument(frame, first + kSalts).data);
  corpus.row_salts = static_cast<uint32_t*>(Argument(frame, first + kRowSalts).data);
  if (std::min({corpus.ring, corpus.num_buckets, corpus.ways}) < 1) return "the corpus has no room";
  return nullptr;
}

}  // namespace jaxserve
