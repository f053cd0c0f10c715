// Writes a block of finished answers to the corpus, in place. The corpus is then exactly what
// jaxserve/speculation/corpus.py makes of it, where the rules are.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

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

using Ends = std::vector<std::pair<int32_t*, int32_t>>;  // where a position is written, and the position

// Finds where n-grams of one length ended, but for those at the very end of an answer, which nothing follows, and asks
// for the memory. A hash is that of the n-gram before, one power higher, with the next token and without the oldest.
void FindEnds(const Corpus& corpus, const Block& block, int64_t level, Ends& ends) {
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
    int32_t* end = corpus.FindBucket(level, state, salt) + block.ways[i];
    __builtin_prefetch(end, 1);
    ends.emplace_back(end, static_cast<int32_t>(block.position + i + 1));
  }
}

void Write(Corpus& corpus, const Block& block) {
  for (int64_t i = block.begin; i < block.end; ++i) {
    if (block.ways[i] < 0) continue;
    const int64_t slot = block.first + i;
    corpus.tokens[slot] = block.tokens[block.before + i];
    corpus.salts[2 * slot] = block.salts[i], corpus.salts[2 * slot + 1] = block.salts[block.size + i];
  }
  thread_local Ends ends;
  for (int64_t level = 0; level < corpus.num_levels; ++level) {
    ends.clear();
    FindEnds(corpus, block, level, ends);
    for (auto [end, position] : ends) *end = std::max(*end, position);
  }
}

const char* Call(const XLA_FFI_CallFrame* frame) {  // returns what is wrong, or null
  enum { kNumbers = kNumCorpusArgs, kBlockTokens, kReaches, kWays, kBlockSalts, kNumArgs };
  constexpr int kWritten[] = {kTokens, kSalts, kEnds};
  if (frame->args.size != kNumArgs || frame->rets.size != 3) return "wrong number of arrays";
  Corpus corpus{};
  if (const char* fault = ReadCorpus(frame, 0, corpus)) return fault;
  for (int i = 0; i < 3; ++i)
    if (Result(frame, i).data != Argument(frame, kWritten[i]).data) return "the corpus must be written in place";
  for (int i = kNumbers; i < kNumArgs; ++i)
    if (Argument(frame, i).dtype != XLA_FFI_DataType_S32) return "all arrays of a block must be int32";

  Block block{};
  block.size = Argument(frame, kWays).dims[0];
  block.before = Argument(frame, kBlockTokens).dims[0] - block.size;
  if (block.size > corpus.ring) return "the block is larger than the corpus";
  if (block.before < corpus.levels[corpus.num_levels - 1]) return "too few tokens before the block";
  block.tokens = Ints(frame, kBlockTokens), block.reaches = Ints(frame, kReaches), block.ways = Ints(frame, kWays);
  block.salts = reinterpret_cast<const uint32_t*>(Ints(frame, kBlockSalts));
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
