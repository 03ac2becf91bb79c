// Threads of our own. ONNX Runtime's take 5 µs to begin and end a piece of work, longer than many an operator of a small
// model, and the caller waits for those that have not begun, too: here a thread that another program keeps from running
// is not waited for.
#include "threads.h"
#include <atomic>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#endif

namespace edgespec {
namespace {
constexpr int kTeams = 4, kMostHelpers = 63;
constexpr int kSpins = 4000;  // some 100 µs: longer than what lies between two operators, shorter than between two passes

#ifdef _WIN32
struct Bed {
  SRWLOCK lock = SRWLOCK_INIT;
  CONDITION_VARIABLE woken = CONDITION_VARIABLE_INIT;
  void enter() { AcquireSRWLockExclusive(&lock); }
  void leave() { ReleaseSRWLockExclusive(&lock); }
  void sleep() { SleepConditionVariableSRW(&woken, &lock, INFINITE, 0); }
  void wake() { WakeAllConditionVariable(&woken); }
};
bool start(unsigned long(__stdcall* run)(void*), void* with) {
  HANDLE thread = CreateThread(nullptr, 0, run, with, 0, nullptr);
  return thread && CloseHandle(thread);
}
void yield() { SwitchToThread(); }
#define THREAD unsigned long __stdcall
#else
struct Bed {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
  void enter() { pthread_mutex_lock(&lock); }
  void leave() { pthread_mutex_unlock(&lock); }
  void sleep() { pthread_cond_wait(&woken, &lock); }
  void wake() { pthread_cond_broadcast(&woken); }
};
bool start(void* (*run)(void*), void* with) {
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, 512 << 10);
  const bool is_started = !pthread_create(&thread, &attributes, run, with);
  pthread_attr_destroy(&attributes);
  return is_started;
}
void yield() { sched_yield(); }
#define THREAD void*
#endif

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

// Of a gate: number of the round, whether helpers may enter, how many of them are asked, how many are inside.
constexpr uint64_t kOpen = 1u << 31, kInside = 0xffff;
constexpr int kAsked = 16, kRound = 32;

// Pieces that are not begun.
struct alignas(64) Share { std::atomic<int64_t> next; int64_t end; };
// Threads that help one caller at a time. What they do is written while nobody is inside.
struct Team {
  struct Helper { Team* team; int index; };
  std::atomic<bool> is_taken;
  int size;
  void (*run)(void*, size_t);
  void* with;
  int shares;
  Bed bed;
  std::atomic<int> asleep;
  Helper helpers[kMostHelpers];
  alignas(64) std::atomic<uint64_t> gate;
  Share share[kMostHelpers + 1];

  // Its own share, then what is left of the others'. Pieces beside one another stay together, as they are fetched ahead.
  void work(int own) {
    for (int i = 0; i < shares; i++) {
      Share& from = share[(own + i) % shares];
      for (int64_t piece; (piece = from.next.fetch_add(1, std::memory_order_relaxed)) < from.end;) run(with, size_t(piece));
    }
  }
  static bool is_for(uint64_t gate, int index, uint32_t last) {
    return gate & kOpen && uint32_t(gate >> kRound) != last && int((gate & ~kOpen & 0xffffffff) >> kAsked) > index;
  }
  uint64_t wait(int index, uint32_t last) {
    for (int i = 0; i < kSpins; i++) {
      const uint64_t now = gate.load(std::memory_order_acquire);
      if (is_for(now, index, last)) return now;
      pause();
    }
    bed.enter();
    asleep++;
    uint64_t now;
    while (!is_for(now = gate.load(), index, last)) bed.sleep();
    asleep--;
    bed.leave();
    return now;
  }
  static THREAD help(void* with) {
    Helper& helper = *static_cast<Helper*>(with);
    Team& team = *helper.team;
    for (uint32_t last = 0;;) {
      uint64_t now = team.wait(helper.index, last);
      if (!team.gate.compare_exchange_strong(now, now + 1, std::memory_order_acq_rel)) continue;
      last = uint32_t(now >> kRound);
      team.work(helper.index + 1);
      team.gate.fetch_sub(1, std::memory_order_release);
    }
  }
  void call(int64_t count, int asked) {
    for (; size < asked; size++) {
      helpers[size] = {this, size};
      if (!start(help, &helpers[size])) break;
    }
    shares = asked + 1;
    for (int i = 0; i < shares; i++) {
      share[i].next.store(count * i / shares, std::memory_order_relaxed);
      share[i].end = count * (i + 1) / shares;
    }
    gate.store(((gate.load() >> kRound) + 1) << kRound | kOpen | uint64_t(asked) << kAsked);
    if (asleep.load()) { bed.enter(); bed.wake(); bed.leave(); }
    work(0);
    gate.fetch_and(~kOpen);  // who has not entered is not waited for
    for (int i = 0; gate.load(std::memory_order_acquire) & kInside; i++) i < kSpins ? pause() : yield();
  }
};
Team teams[kTeams];
thread_local int threads = 1;

#ifndef _WIN32
void forget() {
  for (Team& team : teams) {
    team.size = 0;
    team.bed = Bed();
    team.asleep = 0;
    team.gate = 0;
    team.is_taken = false;
  }
}
// The child of a fork has none of these threads.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, forget);
#endif
}  // namespace

void run_pieces(void (*run)(void*, size_t), int64_t count, void* with) {
  if (threads > 1 && count > 1) for (Team& team : teams) {
    if (team.is_taken.exchange(true, std::memory_order_acquire)) continue;
    team.run = run; team.with = with;
    team.call(count, int(threads <= count ? threads : count) - 1);
    team.is_taken.store(false, std::memory_order_release);
    return;
  }
  for (int64_t i = 0; i < count; i++) run(with, size_t(i));
}
}  // namespace edgespec

// Passes that this thread runs from now on use so many threads, itself included.
extern "C" __attribute__((visibility("default"))) void edgespec_use_threads(int32_t count) {
  using namespace edgespec;
  threads = count < 1 ? 1 : count > kMostHelpers + 1 ? kMostHelpers + 1 : count;
}
