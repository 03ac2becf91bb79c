// Pieces of an operator's work on several threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgespec {
// Calls run(with, 0..count - 1) from this thread and as many others as `edgespec_use_threads` allows; returns when all are done.
void run_pieces(void (*run)(void*, size_t), int64_t count, void* with);
}  // namespace edgespec
