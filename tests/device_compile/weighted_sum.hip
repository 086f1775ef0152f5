// Nothing but weighted sums, of float and of double: what of the combine must not be fused.
#include "kernels/target/hip.h"
//
#include "kernels/body/exchange.h"

using namespace fastkern;

// As the combine adds them.
template <class Sum>
__device__ void sum_row(const KernelArgs& args, u64 window_row, u64 target_row) {
    const HipTarget target;
    const TableView table = view_table(args.table);
    const Combiner<HipTarget, Sum> combiner(target, table, args);
    combiner.sum(combiner.partial_row(window_row, args.rank, target_row));
}

// One after the other, with nothing between product and addition that could keep a compiler
// from it.
template <class Sum>
__device__ void sum_products(const Sum* values, const Sum* weights, u32 count, Sum* sum) {
    Sum total = *sum;
    for (u32 k = 0; k < count; ++k) total = total + HipTarget::product(values[k], weights[k]);
    *sum = total;
}

extern "C" __global__ void sum_floats(const KernelArgs args, u64 from, u64 to) {
    sum_row<float>(args, from, to);
}

extern "C" __global__ void sum_doubles(const KernelArgs args, u64 from, u64 to) {
    sum_row<double>(args, from, to);
}

extern "C" __global__ void sum_float_products(const float* values, const float* weights, u32 count,
                                              float* sum) {
    sum_products(values, weights, count, sum);
}

extern "C" __global__ void sum_double_products(const double* values, const double* weights,
                                               u32 count, double* sum) {
    sum_products(values, weights, count, sum);
}
