#if defined(__ARM_FEATURE_DOTPROD)
#include "lanes_neon.h"
#include "products.h"
#include "recurrence.h"

namespace edgespec { const Path kNeonDot = {"neon-dot", has_neon_dot, quantise, product, &kAttention, &kRecurrence}; }
#endif
