// A call from an XLA program: its threads, its arrays, its errors.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/c_api.h"

namespace jaxserve {

// The threads of XLA that a call may use.
struct Threads {
  const XLA_FFI_CallFrame* frame;

  int64_t Count() const {
    int64_t count = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    args.num_threads = &count;
    Drop(frame->api->XLA_FFI_ThreadPool_NumThreads(&args));
    return count;
  }

  // Runs the task now or later, on any thread.
  void Schedule(std::function<void()> task) const {
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    args.data = new std::function<void()>(std::move(task));
    args.task = [](void* data) {
      std::unique_ptr<std::function<void()>> task(static_cast<std::function<void()>*>(data));
      (*task)();
    };
    XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error) args.task(args.data);
    Drop(error);
  }

 private:
  void Drop(XLA_FFI_Error* error) const {
    if (!error) return;
    XLA_FFI_Error_Destroy_Args args{};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    frame->api->XLA_FFI_Error_Destroy(&args);
  }
};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kTurns = 2000;  // some 30 us of waiting before a thread sleeps, from which it would take as long to wake

// Runs f(index) for each index below count, on XLA's threads and on this one, which waits for the last.
inline void ParallelFor(const Threads& threads, int64_t count, const std::function<void(int64_t)>& f) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable ended;
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, function = &f] {  // f is alive until every index is done
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      (*function)(i);
      if (state->done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->ended.notify_one();
      }
    }
  };
  for (int64_t helpers = std::min(threads.Count(), count) - 1; helpers > 0; --helpers) threads.Schedule(work);
  work();
  auto has_ended = [&] { return state->done.load() == count; };
  for (int turn = 0; turn < kTurns && !has_ended(); ++turn) Pause();
  if (has_ended()) return;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->ended.wait(lock, has_ended);
}

inline XLA_FFI_Buffer Argument(const XLA_FFI_CallFrame* frame, int i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]);
}
inline XLA_FFI_Buffer Result(const XLA_FFI_CallFrame* frame, int i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
}
inline const int32_t* Ints(const XLA_FFI_CallFrame* frame, int i) {
  return static_cast<const int32_t*>(Argument(frame, i).data);
}

// Answers XLA: `call` returns what is wrong, or null.
inline XLA_FFI_Error* Answer(XLA_FFI_CallFrame* frame, const char* (*call)(const XLA_FFI_CallFrame*)) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {  // it asks who we are
    auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return nullptr;
  }
  const char* fault = call(frame);
  if (!fault) return nullptr;
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = fault;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

}  // namespace jaxserve
