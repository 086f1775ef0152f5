// The persistent kernel: one launch per rank and call; blocks run the items of the rank's queues.
// How they find them is in pick.h; what an item does in move_rows.h (all-to-all), dispatch.h and
// combine.h.
//
// Memory order. A flag lives with its waiter and has one writer. Writer: all lanes write their
// data, drain() (each wave on AMD), block barrier, then one lane's store-release at system scope.
// Reader: one lane's load-acquire at system scope, then the block barrier of the broadcast, then
// all lanes read. Who writes what (rank r, server s, local rank l; e: epoch):
//   ready [r] at local peers, and in direct mode r's senders   kernel start of r
//   credit[r] at r's next sender                             kernel start, or r's receive item
//   pack, push, land, arrive                                 the item that wrote the data
// Every remote write but ready, credit and abort waits for the target's ready or credit of this
// epoch, so "kernel start" means "my buffers are free", and nothing is zeroed between calls.
//
// Claiming: see pick.h.
//
// Example, 2 servers x 2 ranks, ranks 0 and 1 send 8 and 4 rows to server 1, chunks of 6 rows. Rank
// 0 packs 6 rows into its own staging and 2 into rank 1's, then signals pack[0] at both. Rank 1
// adds its 4. Each puts one chunk of 6 rows to its same-index peer (0 -> 2, 1 -> 3) once pack flags
// and credit are there, and signals arrive. Rank 3 lands what is its own, hands the rest to rank
// 2's window and signals land[1] there; rank 2 copies window -> output.
#pragma once

#include "kernels/body/combine.h"
#include "kernels/body/dispatch.h"
#include "kernels/body/move_rows.h"
#include "kernels/body/pick.h"

namespace fastkern {

template <class Call>
FASTKERN_DEVICE void post_start_flags(const Call& call) {
    for (u32 k = call.target.lane(); k < call.header().num_posts; k += call.target.num_lanes()) {
        const Post& p = call.table().posts[k];
        call.transport.signal(p.rank, p.slot, p.value, kScaleUp, 0);
    }
}

// Waits until this rank's puts have left its staging and its flags have arrived: only then may the
// next call reuse them. Returns false when the call is aborted.
template <class Call>
FASTKERN_DEVICE bool await_quiet(const Call& call) {
    u64 last_progress_ns = call.target.now_ns();
    u64 last_seen = 0;
    for (u32 rounds = 0; !call.transport.quiet(); ++rounds) {
        if (call.transport.aborted()) return false;
        const u64 now = call.target.now_ns();
        if (now - last_progress_ns > call.args().progress_ns) {
            // A slow link is no stall.
            const u64 seen = call.transport.progress_of_all(call.header().num_ranks);
            if (seen == last_seen) {
                ErrorRecord record{};
                record.waited_ns = now - last_progress_ns;
                record.queue = kPutsWait;
                record.peer = call.args().rank;
                abort_call(call, record);
            }
            last_seen = seen;
            last_progress_ns = now;
        }
        call.transport.progress();
        call.target.pause(rounds);
    }
    return true;
}

template <class Call>
FASTKERN_DEVICE void trace_item(const Call& call, const Item& item, u64 begin_ns) {
    const u64 k = call.target.fetch_add(call.args().trace_count, 1);
    if (k >= call.args().trace_capacity) return;
    TraceEvent& event = call.args().trace[k];
    event.begin_ns = begin_ns;
    event.end_ns = call.target.now_ns();
    event.bytes = item.num_rows * call.header().row_bytes;
    event.queue = item.queue;
    event.stage = item.stage;
    event.chunk = item.chunk;
    event.peer = call.table().streams[item.stream].peer;
    event.block = call.block();
    // Nobody writes the epoch as long as a block runs: it is the call's before.
    event.epoch = static_cast<u32>(call.control().epoch) + 1;
}

// The last block out makes the rank ready for the next call.
template <class Call>
FASTKERN_DEVICE void leave(const Call& call) {
    Control& control = call.control();
    if (call.target.fetch_add(&control.blocks_out, 1) + 1 != call.args().num_blocks) return;
    if (call.transport.aborted() || !await_quiet(call))
        return call.transport.pass_on_abort(call.header().num_ranks);
    for (u32 q = 0; q < kNumQueues; ++q) call.target.store_relaxed(&control.tickets[q], 0);
    call.target.store_relaxed(&control.blocks_out, 0);
    call.target.store_release(&control.epoch, call.transport.epoch());
}

// What an operation does with an item; a kernel is made for each.
struct AllToAll {
    static constexpr bool kMoe = false;
    template <class Call>
    static FASTKERN_DEVICE void run(const Call& call, const RunningItem<Call>& item) {
        move_rows(call, item);
    }
};
struct Dispatch {
    static constexpr bool kMoe = true;
    template <class Call>
    static FASTKERN_DEVICE void run(const Call& call, const RunningItem<Call>& item) {
        dispatch_rows(call, item);
    }
};
template <class Sum>
struct Combine {
    static constexpr bool kMoe = true;
    template <class Call>
    static FASTKERN_DEVICE void run(const Call& call, const RunningItem<Call>& item) {
        combine_rows<Sum>(call, item);
    }
};

template <class Op, class Call>
FASTKERN_DEVICE void run_items(const Call& call) {
    const auto& target = call.target;
    call.keep_views();
    if (call.block() == 0) post_start_flags(call);
    Picker<Call>(call).begin();
    for (;;) {
        call.forget();
        Picker<Call>(call).look();
        target.barrier();
        call.forget();
        const auto& choice = target.template broadcast<Choice>(
            [&](Choice& decided) { Picker<Call>(call).choose(&decided); });
        const u32 decision = Call::Target::uniform(choice.decision);
        if (decision == kLeave) break;
        if (decision != kRunItem) continue;
        const u64 begin_ns = call.args().trace ? target.now_ns() : 0;
        call.forget();
        Op::run(call, RunningItem<Call>{choice.item});
        call.forget();
        if (call.args().trace && target.lane() == 0) trace_item(call, choice.item, begin_ns);
    }
    if (target.lane() == 0) leave(call);
}

// One block of one rank.
template <class Op, class Target, class Transport>
FASTKERN_DEVICE void exchange_block(const Target& target, const Transport& transport,
                                    const KernelArgs& args) {
    const Call<Target, Transport> call{target, transport, &args};
    if constexpr (Op::kMoe)
        run_items<Op>(MoeCall<Target, Transport>{call, &target.share(*args.moe)});
    else
        run_items<Op>(call);
}

// A block of a device launch: those of one rank after those of the other.
template <class Op, template <class> class Transport, class Target>
FASTKERN_DEVICE void run_launch(const Target& target, const LaunchArgs& launch) {
    const KernelArgs& args = target.share(launch.ranks[target.block() / launch.blocks_per_rank]);
    exchange_block<Op>(target, Transport<Target>(target, args), args);
}

}  // namespace fastkern
