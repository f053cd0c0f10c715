// Writes a block of finished answers to the corpus, in place. The corpus is then exactly what
// jaxserve/features/speculation/corpus.py makes of it, where the rules are.

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "corpus.h"

namespace {

using namespace jaxserve;

// Tokens for neighbouring slots of the ring.
struct Block {
  const int32_t *tokens, *reaches, *ways;  // `tokens` from those before the block on
  const uint32_t* salts;                   // [2, size]
  int64_t size, before, first, position;
  int64_t begin, end;  // of what is written
};

// Moves all positions down.
void MoveDown(Corpus& corpus, int64_t shift) {
  int32_t* const last = corpus.ends + corpus.num_levels * corpus.num_buckets * corpus.ways;
  for (int32_t* end = corpus.ends; end != last; ++end) *end = std::max<int64_t>(*end - shift, 0);
}

// Writes where n-grams of one length ended, but for those at the very end of an answer, which nothing follows. A hash is
// that of the n-gram before, one power higher, with the next token and without the oldest.
void WriteEnds(Corpus& corpus, const Block& block, int64_t level) {
  const int64_t length = corpus.levels[level];
  uint32_t state = 0, highest = kBase;  // the power of the token before an n-gram
  for (int64_t i = 0; i < length; ++i) highest *= kBase;
  for (int64_t i = block.begin - length; i < block.end; ++i) {
    const int32_t* token = block.tokens + block.before + i;
    state = (state + static_cast<uint32_t>(*token) + kBase) * kBase;
    if (i < block.begin) continue;
    state -= highest * (static_cast<uint32_t>(token[-length]) + kBase);
    if (block.reaches[i] < length || block.ways[i] < 0 || block.ways[i] >= corpus.ways) continue;
    const uint32_t salt[] = {block.salts[i], block.salts[block.size + i]};
    int32_t& end = corpus.FindBucket(level, state, salt)[block.ways[i]];
    end = std::max<int32_t>(end, block.position + i + 1);
  }
}

void Write(Corpus& corpus, const Block& block) {
  for (int64_t i = block.begin; i < block.end; ++i) {
    if (block.ways[i] < 0) continue;
    const int64_t slot = block.first + i;
    corpus.tokens[slot] = block.tokens[block.before + i];
    corpus.salts[2 * slot] = block.salts[i], corpus.salts[2 * slot + 1] = block.salts[block.size + i];
  }
  for (int64_t level = 0; level < corpus.num_levels; ++level) WriteEnds(corpus, block, level);
}

const char* Call(const XLA_FFI_CallFrame* frame) {  // returns what is wrong, or null
  enum { kNumbers = kNumCorpusArgs, kBlockTokens, kReaches, kWays, kBlockSalts, kNumArgs };
  constexpr int kWritten[] = {kTokens, kSalts, kEnds};
  if (frame->args.size != kNumArgs || frame->rets.size != 3) return "wrong number of arrays";
  Corpus corpus{};
  if (const char* fault = ReadCorpus(frame, 0, corpus)) return fault;
  for (int i = 0; i < 3; ++i)
    if (Result(frame, i).data != Argument(frame, kWritten[i]).data) return "the corpus must be written in place";
  for (int i = kNumbers; i < kBlockSalts; ++i)
    if (Argument(frame, i).dtype != XLA_FFI_DataType_S32) return "all arrays but salts must be int32";
  if (Argument(frame, kBlockSalts).dtype != XLA_FFI_DataType_U32) return "salts must be uint32";

  Block block{};
  block.size = Argument(frame, kWays).dims[0];
  block.before = Argument(frame, kBlockTokens).dims[0] - block.size;
  if (block.size > corpus.ring) return "the block is larger than the corpus";
  if (block.before < corpus.levels[corpus.num_levels - 1]) return "too few tokens before the block";
  block.tokens = Ints(frame, kBlockTokens), block.reaches = Ints(frame, kReaches), block.ways = Ints(frame, kWays);
  block.salts = static_cast<const uint32_t*>(Argument(frame, kBlockSalts).data);
  const int32_t* numbers = Ints(frame, kNumbers);
  block.first = std::clamp<int64_t>(numbers[0], 0, corpus.ring - block.size), block.position = numbers[1];
  block.end = block.size;
  while (block.begin < block.end && block.ways[block.begin] < 0) ++block.begin;
  while (block.end > block.begin && block.ways[block.end - 1] < 0) --block.end;
  if (numbers[2] > 0) MoveDown(corpus, numbers[2]);
  Write(corpus, block);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* JaxserveRemember(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
