#ifdef __AVX2__
#include "products.h"
namespace edgespec { extern const Path kAvx2; const Path kAvx2 = {"avx2", quantise, product}; }
#endif
