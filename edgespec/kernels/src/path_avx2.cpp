#if defined(__AVX2__)
#include "lanes_256.h"
#include "products.h"
#include "recurrence.h"

namespace edgespec { const Path kAvx2 = {"avx2", has_avx2, quantise, product, &kAttention, &kRecurrence}; }
#endif
