// Writes tokens of a row to the tokens of all rows, in place. XLA would compute a whole row, and give the program to
// another thread for that, which takes longer than this.

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace {

using namespace jaxserve;

const char* Call(const XLA_FFI_CallFrame* frame) {  // returns what is wrong, or null
  enum { kHistory, kRow, kSpan, kTokens, kNumArgs };
  if (frame->args.size != kNumArgs || frame->rets.size != 1) return "wrong number of arrays";
  for (int i = 0; i < kNumArgs; ++i)
    if (Argument(frame, i).dtype != XLA_FFI_DataType_S32) return "all arrays must be int32";
  if (Result(frame, 0).data != Argument(frame, kHistory).data) return "the tokens must be written in place";
  const int64_t num_rows = Argument(frame, kHistory).dims[0], max_len = Argument(frame, kHistory).dims[1];
  if (Argument(frame, kTokens).dims[0] != max_len) return "a row has another length";
  const int64_t row = std::clamp<int64_t>(*Ints(frame, kRow), 0, num_rows - 1);
  const int64_t start = std::clamp<int64_t>(Ints(frame, kSpan)[0], 0, max_len);
  const int64_t end = std::clamp<int64_t>(Ints(frame, kSpan)[1], start, max_len);
  int32_t* tokens = static_cast<int32_t*>(Result(frame, 0).data) + row * max_len;
  std::copy(Ints(frame, kTokens) + start, Ints(frame, kTokens) + end, tokens + start);
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* JaxserveWriteTokens(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
