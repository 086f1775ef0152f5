// The persistent kernel: one launch per rank and call; blocks run the items of the rank's queues.
// What an item does is in move_rows.h (all-to-all), dispatch.h and combine.h.
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
// Claiming. A block looks at the heads of all queues and takes, by compare-and-swap on the queue's
// ticket, only an item that can run now; it then runs it without waiting. No block holds an item
// while it waits, so any number of blocks ends: plan times strictly increase along dependencies and
// never fall in a queue, so the earliest item not yet run anywhere is at the head of its queue and
// can run.
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

namespace fastkern {

// What lane 0 decided, for all lanes of the block.
enum Decision : u32 { kRunItem, kLookAgain, kLeave };

struct Choice {
    Item item;
    u32 decision;
};

template <class Target, class Transport>
FASTKERN_DEVICE void post_start_flags(const Target& target, const Transport& transport,
                                      const TableView& table) {
    for (u32 k = target.lane(); k < table.header->num_posts; k += target.num_lanes()) {
        const Post& p = table.posts[k];
        transport.signal(p.rank, p.slot, p.value, kScaleUp, 0);
    }
}

// A deadline has passed: one record here, then every rank is told to leave. The words of all ranks
// name the same origin: the first to reach the home word, which is rank 0's, whoever copies it on.
template <class Target>
FASTKERN_DEVICE void abort_call(const Target& target, const KernelArgs& args, u32 num_ranks,
                                ErrorRecord record) {
    ErrorRecord& own = args.controls[args.rank]->record;
    if (target.compare_and_swap(&own.state, kNoRecord, kRecordInWork)) {
        record.epoch = args.epoch;
        record.state = kRecordInWork;
        own = record;
        target.store_release(&own.state, kRecordWritten);
    } else {
        return;  // another block of this rank is at it
    }
    u64* home = &args.controls[0]->abort;
    target.compare_and_swap(home, 0, args.epoch << kValueBits | (args.rank + 1));
    const u64 word = target.load_acquire(home);
    for (u32 r = 0; r < num_ranks; ++r) target.compare_and_swap(&args.controls[r]->abort, 0, word);
}

// Waits until this rank's puts have left its staging and its flags have arrived: only then may the
// next call reuse them.
template <class Target, class Transport>
FASTKERN_DEVICE bool await_quiet(const Target& target, const Transport& transport,
                                 const KernelArgs& args, u32 num_ranks) {
    u64 last_progress_ns = target.now_ns();
    u64 last_seen = 0;
    for (u32 rounds = 0; !transport.quiet(); ++rounds) {
        if (target.load_acquire(&args.controls[args.rank]->abort) != 0) return false;
        const u64 now = target.now_ns();
        if (now - last_progress_ns > args.progress_ns) {
            const u64 seen = transport.progress_of_all(num_ranks);  // a slow link is no stall
            if (seen == last_seen) {
                ErrorRecord record{};
                record.waited_ns = now - last_progress_ns;
                record.queue = kNumQueues;
                record.peer = args.rank;
                abort_call(target, args, num_ranks, record);
            }
            last_seen = seen;
            last_progress_ns = now;
        }
        transport.progress();
        target.pause(rounds);
    }
    return true;
}

// One lane's search for the runnable head of least plan time.
template <class Target, class Transport>
class Picker {
  public:
    FASTKERN_DEVICE Picker(const Target& target, const Transport& transport, const KernelArgs& args)
        : target_(target), transport_(transport), args_(args), table_(view_table(args.table)) {
        for (u32 q = 0; q < kNumQueues; ++q) stage_[q] = 0;
        last_progress_ns_ = target_.now_ns();
    }

    FASTKERN_DEVICE Choice pick() {
        Control* control = args_.controls[args_.rank];
        Choice choice{};
        choice.decision = kLookAgain;
        transport_.progress();
        u64 best_time = ~u64{0}, claimed = 0;
        Item stuck{};
        u64 stuck_time = ~u64{0};
        bool any_left = false;
        for (u32 q = 0; q < kNumQueues; ++q) {
            u64 ticket = target_.load_relaxed(&control->tickets[q]);
            // Items without rows need no wait and do nothing: pass them here.
            while (ticket < table_.queues[q].num_items) {
                const Item item = locate(q, ticket);
                if (item.num_rows != 0) break;
                if (target_.compare_and_swap(&control->tickets[q], ticket, ticket + 1)) {
                    last_progress_ns_ = 0;
                    ++ticket;
                } else {
                    ticket = target_.load_relaxed(&control->tickets[q]);
                }
            }
            claimed += ticket;
            if (ticket >= table_.queues[q].num_items) continue;
            any_left = true;
            const Item item = locate(q, ticket);
            const u64 time = item_time(table_, item);
            if (time >= best_time) continue;
            if (can_run(target_, transport_, table_, args_, item, nullptr)) {
                best_time = time;
                choice.item = item;
                choice.decision = kRunItem;
            } else if (time < stuck_time) {
                stuck_time = time;
                stuck = item;
            }
        }
        if (target_.load_acquire(&control->abort) != 0) {
            choice.decision = kLeave;
        } else if (!any_left) {
            choice.decision = kLeave;
        } else if (choice.decision == kRunItem) {
            const Item& item = choice.item;
            if (!target_.compare_and_swap(&control->tickets[item.queue], item.ticket,
                                          item.ticket + 1))
                choice.decision = kLookAgain;  // another block took it
            last_progress_ns_ = 0;
            idle_rounds_ = 0;
        } else {
            wait_a_little(claimed, stuck);
        }
        return choice;
    }

  private:
    const Target& target_;
    const Transport& transport_;
    const KernelArgs& args_;
    const TableView table_;
    u32 stage_[kNumQueues];  // where each queue's head was last seen
    u64 last_claimed_ = ~u64{0};
    u64 last_progress_ns_ = 0;  // 0: read the clock at the next idle look
    u64 last_seen_of_all_ = 0;
    u32 idle_rounds_ = 0;
    bool looked_ = false;

    FASTKERN_DEVICE Item locate(u32 queue, u64 ticket) {
        const Stage* stages = table_.stages + table_.queues[queue].first_stage;
        u32 k = stage_[queue];
        while (ticket >= stages[k].first_item + u64{stages[k].num_chunks} * stages[k].num_streams)
            ++k;
        stage_[queue] = k;
        return make_item(table_, queue, k, ticket);
    }

    FASTKERN_DEVICE void wait_a_little(u64 claimed, const Item& stuck) {
        const u64 now = target_.now_ns();
        if (claimed != last_claimed_ || last_progress_ns_ == 0) {
            last_claimed_ = claimed;
            last_progress_ns_ = now;
            idle_rounds_ = 0;
            looked_ = false;
        } else if (now - last_progress_ns_ > args_.progress_ns / 2) {
            if (look_around(now)) give_up(stuck, now);
        }
        target_.pause(idle_rounds_++);
    }

    // Half the deadline has passed without a claim here. Waiting long is no fault while other ranks
    // get on: the deadline counts from the last change anywhere, seen by looks half of it apart.
    FASTKERN_DEVICE bool look_around(u64 now) {
        const bool expired = now - last_progress_ns_ > args_.progress_ns;
        if (looked_ && !expired) return false;
        const u64 seen = transport_.progress_of_all(table_.header->num_ranks);
        const bool moved = !looked_ || seen != last_seen_of_all_;
        looked_ = true;
        last_seen_of_all_ = seen;
        if (expired && moved) last_progress_ns_ = now - args_.progress_ns / 2;
        return expired && !moved;
    }

    FASTKERN_DEVICE void give_up(const Item& stuck, u64 now) {
        ErrorRecord record{};
        if (can_run(target_, transport_, table_, args_, stuck, &record) ||
            record.seen >= record.expected) {
            last_progress_ns_ = now;  // it came after all, or is on its way on a slow link
            return;
        }
        record.waited_ns = now - last_progress_ns_;
        record.queue = stuck.queue;
        record.stage = stuck.stage;
        record.chunk = stuck.chunk;
        abort_call(target_, args_, table_.header->num_ranks, record);
    }
};

template <class Target>
FASTKERN_DEVICE void trace_item(const Target& target, const TableView& table,
                                const KernelArgs& args, const Item& item, u64 begin_ns) {
    const u64 k = target.fetch_add(args.trace_count, 1);
    if (k >= args.trace_capacity) return;
    TraceEvent event{};
    event.begin_ns = begin_ns;
    event.end_ns = target.now_ns();
    event.bytes = item.num_rows * table.header->row_bytes;
    event.queue = item.queue;
    event.stage = item.stage;
    event.chunk = item.chunk;
    event.peer = table.streams[item.stream].peer;
    event.block = target.block();
    args.trace[k] = event;
}

// The items of one operation; a kernel is made for each.
template <u32 kOp, class Target, class Transport>
FASTKERN_DEVICE void run_item(const Target& target, const Transport& transport,
                              const TableView& table, const KernelArgs& args, const Item& item) {
    if constexpr (kOp == kAllToAll)
        move_rows(target, transport, table, args, item);
    else if constexpr (kOp == kDispatch)
        dispatch_rows(target, transport, table, args, item);
    else
        combine_rows(target, transport, table, args, item);
}

template <u32 kOp, class Target, class Transport>
FASTKERN_DEVICE void exchange_block(const Target& target, const Transport& transport,
                                    const KernelArgs& args) {
    const TableView table = view_table(args.table);
    Control* control = args.controls[args.rank];
    if (target.block() == 0) post_start_flags(target, transport, table);
    Picker<Target, Transport> picker(target, transport, args);
    for (;;) {
        Choice choice{};
        if (target.lane() == 0) choice = picker.pick();
        choice = target.broadcast(choice);
        if (choice.decision == kLeave) break;
        if (choice.decision != kRunItem) continue;
        const u64 begin_ns = args.trace ? target.now_ns() : 0;
        run_item<kOp>(target, transport, table, args, choice.item);
        if (args.trace && target.lane() == 0)
            trace_item(target, table, args, choice.item, begin_ns);
    }
    if (target.lane() != 0) return;
    // The last block out makes the rank ready for the next call.
    if (target.fetch_add(&control->blocks_out, 1) + 1 != args.num_blocks) return;
    if (target.load_acquire(&control->abort) != 0) return;
    if (!await_quiet(target, transport, args, table.header->num_ranks)) return;
    for (u32 q = 0; q < kNumQueues; ++q) target.store_relaxed(&control->tickets[q], 0);
    target.store_relaxed(&control->blocks_out, 0);
    target.store_release(&control->epoch, args.epoch);
}

}  // namespace fastkern
