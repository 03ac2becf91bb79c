#if defined(__AVXVNNI__)
#include "lanes_256.h"
#include "products.h"

namespace edgespec { const Path kAvxVnni = {"avx-vnni", has_avx_vnni, quantise, product}; }
#endif
