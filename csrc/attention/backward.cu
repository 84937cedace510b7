// The backward kernels, compiled apart from the others so that two cores share the work.
#include "attention/backward.cuh"

namespace mlbench::attention {

template bool launch_backward<half>(const Parameters& p, int64_t head_dim, Stream stream);
template bool launch_backward<bfloat>(const Parameters& p, int64_t head_dim, Stream stream);

}  // namespace mlbench::attention
