#include "kernels/target/host.h"
//
#include <atomic>
#include <deque>
#include <thread>
#include <vector>

#include "kernels/body/exchange.h"
#include "kernels/entry/host_launch.h"
#include "kernels/transport/mapped.h"
#include "kernels/transport/shaped.h"
#include "kernels/transport/shuffled.h"

namespace fastkern {

namespace {

enum class Start { kWait, kGo, kCancel };

template <class Transport>
void run_op(const HostTarget& target, const Transport& transport, const KernelArgs& args) {
    switch (view_table(args.table).header->op) {
        case kDispatch:
            return exchange_block<kDispatch>(target, transport, args);
        case kCombine:
            return exchange_block<kCombine>(target, transport, args);
        default:
            return exchange_block<kAllToAll>(target, transport, args);
    }
}

void run_lane(const KernelArgs& args, const LaunchOptions& options, HostBlock* shared, u32 block,
              u32 lane, ShuffledQueue* queue) {
    const HostTarget target(shared, block, lane);
    switch (options.transport) {
        case HostTransport::kShm:
            return run_op(target, MappedTransport<HostTarget>(target, args), args);
        case HostTransport::kShaped:
            return run_op(target, ShapedTransport<HostTarget>(target, args, options.rates), args);
        case HostTransport::kShuffled:
            return run_op(target, ShuffledTransport<HostTarget>(target, args, queue), args);
    }
}

}  // namespace

bool launch_on_host(KernelArgs args, const LaunchOptions& options) {
    args.num_blocks = options.num_blocks;
    ShuffledQueue queue(options.seed * 1'000'003 + args.rank + (args.epoch << 20));
    std::deque<HostBlock> blocks(options.num_blocks);
    for (HostBlock& block : blocks) block.num_lanes = options.num_lanes;
    // Threads begin together, or not at all where one of them cannot be made.
    std::atomic<Start> start{Start::kWait};
    std::vector<std::thread> threads;
    try {
        for (u32 b = 0; b < options.num_blocks; ++b)
            for (u32 l = 0; l < options.num_lanes; ++l)
                if (b || l)
                    threads.emplace_back([&, b, l] {
                        Start word;
                        while ((word = start.load(std::memory_order_acquire)) == Start::kWait)
                            std::this_thread::yield();
                        if (word == Start::kGo) run_lane(args, options, &blocks[b], b, l, &queue);
                    });
    } catch (...) {
        start.store(Start::kCancel, std::memory_order_release);
        for (std::thread& t : threads) t.join();
        throw;
    }
    start.store(Start::kGo, std::memory_order_release);
    run_lane(args, options, &blocks[0], 0, 0, &queue);
    for (std::thread& t : threads) t.join();
    return HostTarget::load_acquire(&args.controls[args.rank]->epoch) == args.epoch;
}

}  // namespace fastkern
