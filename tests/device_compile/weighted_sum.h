// The weighted sums of a combine, without what surrounds them.
#pragma once

#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

namespace fastkern {

struct SumArgs {
    const KernelArgs* call;
    const Item* item;
    const u8* values;
    const u8* weights;
    u8* sum;
    u32 count;
    u32 to_row;
};

// A row of sums, as a combine adds it up.
template <class Target, class Sum>
FASTKERN_DEVICE void sum_row(const SumArgs& args) {
    using Transport = MappedTransport<Target>;
    const Target target;
    const Transport transport(target, *args.call);
    const MoeCall<Target, Transport> call{{target, transport, args.call}, args.call->moe};
    call.keep_views();
    const RunningItem<MoeCall<Target, Transport>> item{*args.item};
    Combiner<MoeCall<Target, Transport>, Sum>(call, item).sum(SumRow{args.count, args.to_row});
}

// One after the other, with nothing between product and addition that could keep a compiler from
// fusing them.
template <class Target, class Sum>
FASTKERN_DEVICE void sum_products(const SumArgs& args) {
    const Sum* const values = reinterpret_cast<const Sum*>(args.values);
    const Sum* const weights = reinterpret_cast<const Sum*>(args.weights);
    Sum total = *reinterpret_cast<Sum*>(args.sum);
    for (u32 k = 0; k < args.count; ++k) total = total + Target::product(values[k], weights[k]);
    *reinterpret_cast<Sum*>(args.sum) = total;
}

}  // namespace fastkern
