// The forward kernels, compiled apart from the others so that two cores share the work.
#include "attention/forward.cuh"

namespace mlbench::attention {

template bool launch_forward<half>(const Parameters& p, int64_t head_dim, Stream stream);
template bool launch_forward<bfloat>(const Parameters& p, int64_t head_dim, Stream stream);

}  // namespace mlbench::attention
