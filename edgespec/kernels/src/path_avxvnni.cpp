#ifdef __AVXVNNI__
#include "products.h"
namespace edgespec { extern const Path kAvxVnni; const Path kAvxVnni = {"avx-vnni", quantise, product}; }
#endif
