#include "kernels/entry/host_threads.h"
//
#include "kernels/body/exchange.h"
#include "kernels/entry/host_launch.h"
#include "kernels/transport/mapped.h"
#include "kernels/transport/shaped.h"
#include "kernels/transport/shuffled.h"

namespace fastkern {

namespace {

template <class Target, class Transport>
void run_op(const Target& target, const Transport& transport, const KernelArgs& args) {
    switch (view_table(args.table).header->op) {
        case kDispatch:
            return exchange_block<Dispatch>(target, transport, args);
        case kCombine:
            if (args.moe->value_kind == kFloat64)
                return exchange_block<Combine<double>>(target, transport, args);
            return exchange_block<Combine<float>>(target, transport, args);
        default:
            return exchange_block<AllToAll>(target, transport, args);
    }
}

template <class Target>
void run_lane(const Target& target, const KernelArgs& args, const LaunchOptions& options,
              ShuffledQueue* queue) {
    switch (options.transport) {
        case HostTransport::kShm:
            return run_op(target, MappedTransport<Target>(target, args), args);
        case HostTransport::kShaped:
            return run_op(target, ShapedTransport<Target>(target, args, options.rates), args);
        case HostTransport::kShuffled:
            return run_op(target, ShuffledTransport<Target>(target, args, queue), args);
    }
}

}  // namespace

bool launch_on_host(KernelArgs args, const LaunchOptions& options) {
    args.num_blocks = options.num_blocks;
    ShuffledQueue queue(options.seed * 1'000'003 + args.rank + (args.epoch << 20));
    run_blocks(options.num_blocks, options.num_lanes, options.teams,
               [&](const auto& target) { run_lane(target, args, options, &queue); });
    return HostTarget::load_acquire(&args.controls[args.rank]->epoch) == args.epoch;
}

}  // namespace fastkern
