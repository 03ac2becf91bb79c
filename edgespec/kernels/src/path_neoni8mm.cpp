#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "lanes_neon.h"
#include "products.h"
#include "recurrence.h"

namespace edgespec { const Path kNeonI8mm = {"neon-i8mm", has_neon_i8mm, quantise, product, &kAttention, &kRecurrence}; }
#endif
