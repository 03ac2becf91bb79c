#if defined(__AVX2__)
#include "lanes_256.h"
#include "products.h"
#include "attention.h"

namespace edgespec { const Path kAvx2 = {"avx2", has_avx2, quantise, product, &kAttention}; }
#endif
