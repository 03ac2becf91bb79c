// The kernels of one instruction set. The build compiles this once for each that the compiler knows: with its flags, its
// Lanes included before, and its name as EDGESPEC_PATH.
#include "products.h"
#include "recurrence.h"

namespace edgespec {
#define NAMED(name) extern const Kernels name = {quantise, product, &kAttention, &kRecurrence};
#define EXPANDED(name) NAMED(name)
EXPANDED(EDGESPEC_PATH)
}  // namespace edgespec
