// tilelang's own header, as its run-time compilation includes it. It calls __hmax_nan for every
// architecture, and is what failed on the headers of CUDA 12.0.
#include <tl_templates/cuda/reduce.h>

extern "C" __global__ void probe_tilelang_reduce(half_t *values)
{
    values[0] = tl::MaxOp()(values[1], values[2]);
}
