#if defined(__AVXVNNI__)
#include "lanes_256.h"
#include "products.h"
#include "recurrence.h"

namespace edgespec { const Path kAvxVnni = {"avx-vnni", has_avx_vnni, quantise, product, &kAttention, &kRecurrence}; }
#endif
