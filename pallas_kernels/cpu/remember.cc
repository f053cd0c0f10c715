// Writes a finished answer to the corpus, in place. The corpus is then exactly what jaxserve/speculation/corpus.py makes
// of it, where the rules are: an answer lies in one piece between two separators, in a way of its number.

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "corpus.h"

namespace {

using namespace jaxserve;

// From `max_position` on, moves all positions down by a multiple of the ring's size.
void MoveDownIfFar(Corpus& corpus, int64_t max_position) {
  if (*corpus.num_written < max_position) return;
  const int32_t shift = (*corpus.num_written / corpus.ring - 1) * corpus.ring;  // what lies in the ring stays above 0
  auto move = [&](int32_t* positions, int64_t count) {
    for (int64_t i = 0; i < count; ++i) positions[i] = positions[i] > shift ? positions[i] - shift : 0;
  };
  move(corpus.ends, corpus.num_levels * corpus.num_buckets * corpus.ways);
  move(corpus.begins, corpus.limit);
  *corpus.num_written -= shift;
  const int64_t turn = corpus.limit * corpus.ways;  // numbers keep their way and their place in `begins`
  *corpus.num_answers = *corpus.num_answers % turn + (*corpus.num_answers >= turn ? turn : 0);
}

// Writes where the n-grams of an answer ended, but for those at its very end, which nothing follows. A hash is that of
// the n-gram before, one power higher, with the next token and without the oldest.
void WriteEnds(Corpus& corpus, const int32_t* answer, int64_t count, const uint32_t* salt, int64_t begin, int64_t way) {
  for (int64_t level = 0; level < corpus.num_levels; ++level) {
    const int64_t size = corpus.levels[level];
    uint32_t state = 0, highest = kBase;  // the power of the token before an n-gram
    for (int64_t i = 0; i < size; ++i) highest *= kBase;
    for (int64_t i = 0; i + 1 < count; ++i) {
      state = (state + static_cast<uint32_t>(answer[i]) + kBase) * kBase;
      if (i >= size) state -= highest * (static_cast<uint32_t>(answer[i - size]) + kBase);
      if (i + 1 < size) continue;
      int32_t& end = corpus.FindBucket(level, state, salt)[way];
      end = std::max<int32_t>(end, begin + i + 1);
    }
  }
}

void Remember(Corpus& corpus, const int32_t* answer, int64_t count, const uint32_t* salt, int32_t separator) {
  int64_t begin = *corpus.num_written;
  const int64_t rest = (corpus.ring - begin % corpus.ring) % corpus.ring;
  if (rest < count + 2) begin += rest;  // it would not fit before the ring's end
  const int64_t first = begin % corpus.ring, number = *corpus.num_answers;
  corpus.tokens[first] = corpus.tokens[first + count + 1] = separator;
  std::copy(answer, answer + count, corpus.tokens + first + 1);
  for (int64_t slot = first; slot < first + count + 2; ++slot)
    corpus.salts[2 * slot] = salt[0], corpus.salts[2 * slot + 1] = salt[1];
  WriteEnds(corpus, answer, count, salt, begin + 1, number % corpus.ways);
  corpus.begins[number % corpus.limit] = begin;
  *corpus.num_written = begin + count + 2, *corpus.num_answers = number + 1;
}

const char* Call(const XLA_FFI_CallFrame* frame) {  // returns what is wrong, or null
  enum { kHistory = kNumCorpusArgs, kRow, kStart, kEnd, kNumbers, kNumArgs };
  constexpr int kWritten[] = {kTokens, kSalts, kEnds, kBegins, kNumWritten, kNumAnswers};
  if (frame->args.size != kNumArgs || frame->rets.size != 6) return "wrong number of arrays";
  Corpus corpus{};
  if (const char* fault = ReadCorpus(frame, 0, corpus)) return fault;
  for (int i = 0; i < 6; ++i)
    if (Result(frame, i).data != Argument(frame, kWritten[i]).data) return "the corpus must be written in place";
  for (int i = kHistory; i < kNumArgs; ++i)
    if (Argument(frame, i).dtype != XLA_FFI_DataType_S32) return "all arrays but salts must be int32";
  if (*corpus.num_written < 0 || *corpus.num_answers < 0) return "the corpus is not whole";

  const int64_t num_rows = Argument(frame, kHistory).dims[0], max_len = Argument(frame, kHistory).dims[1];
  const int64_t row = std::clamp<int64_t>(*Ints(frame, kRow), 0, num_rows - 1);
  const int64_t start = std::max<int64_t>(*Ints(frame, kStart), 0), end = std::min<int64_t>(*Ints(frame, kEnd), max_len);
  const int64_t count = std::min(end - start, corpus.ring - 2);  // of a longer one, the last tokens
  MoveDownIfFar(corpus, Ints(frame, kNumbers)[0]);
  if (count <= 0) return nullptr;
  const int32_t* answer = Ints(frame, kHistory) + row * max_len + end - count;
  Remember(corpus, answer, count, corpus.row_salts + 2 * row, Ints(frame, kNumbers)[1]);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* JaxserveRemember(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
