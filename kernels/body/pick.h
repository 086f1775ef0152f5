// How a block finds work, and when it gives up.
//
// A block looks at the heads of all queues, a lane at each, and takes, by compare-and-swap on the
// queue's ticket, only an item that can run now; it then runs it without waiting. No block holds an
// item while it waits, so any number of blocks ends: plan times strictly increase along
// dependencies and never fall in a queue, so the earliest item not yet run anywhere is at the head
// of its queue and can run.
//
// Blocks that look at the same time choose the same head, and one gets it. A look takes several
// reads in a row, so the others do not look again at once: a swap that fails says which item is
// next, and they swap from there on, as long as it is an item that they have seen can run, or one
// without rows, which they pass. For that they look at a window of items of each queue, more lanes
// side by side; it is open at the start, when all come at once, and while claims are lost, and one
// item wide otherwise. What has been seen stays true: in a call tickets only grow, flags are only
// raised and exhausted queues stay so, and what can run once can run until the call ends. (All but
// can_send(), which paces a link: others may fill it between look and claim, of a head as of any
// item, by an item each at most.)
//
// Memory order. The lane that looks at an item acquires its flags; the barrier between look() and
// choose() hands that on to lane 0, whose claim hands it to whoever reads the ticket, and the
// barrier of the broadcast to all lanes, which then read what the flags vouch for.
//
// Example: heads are pack 3 (time 8, can run), put 1 (time 6, its pack flag is not there), land 0
// (time 11, can run). Two blocks that have lost no claim lately swap the ticket of pack from 3 to
// 4. The one that loses has found 4 there, but has looked at heads only: it looks again, with 128
// lanes at 16 items of each queue, of pack 4 to 19. Meanwhile others have taken 4 to 6: its swap
// from 4 finds 7, that from 7 gets pack 7. (Had 7 no rows, it would have passed it and gone on to
// 8.) The block's next look is at 16 items again; where it gets a head at once, that after it is at
// 8, then 4, 2 and 1.
#pragma once

#include "kernels/body/items.h"

namespace fastkern {

// What lane 0 decided, for all lanes of the block.
enum Decision : u32 { kRunItem, kLookAgain, kLeave };

struct Choice {
    Item item;
    u32 decision;
    u32 reserved;
};

// Of an item. Claims go on to those from kNoRows on.
enum Verdict : u32 { kExhausted, kMustWait, kNoRows, kCanRun };

// How many items of a queue a block looks at after it has lost a claim: as many as it has lanes
// for, within these bounds.
constexpr u32 kLeastWindow = 4, kMostWindow = 16;

// The first item of a queue that nobody has claimed, or one after it, as last seen by this block.
struct Head {
    Item item;
    u64 time;  // its plan time
    u32 verdict;
    // In the first that a lane looks at: the queue of the first to run of all heads that it has
    // seen can run, or kNumQueues.
    u32 best;
};

// Shared by the lanes of a block. Heads belong to the lanes that look at them, and to lane 0
// between the barrier and the broadcast; the rest to lane 0. All lanes read the window, outside of
// these two.
struct Look {
    // [j * kNumQueues + queue]: the item that is j after the first. Looked at for j < window.
    Head heads[kMostWindow * kNumQueues];
    u64 last_claimed;
    u64 last_progress_ns;  // 0: read the clock at the next idle look
    u64 last_seen_of_all;
    u32 idle_rounds;
    u32 looked;
    u32 window;       // items of each queue that the next look is at
    u32 open_window;  // after a lost claim
};

// A deadline has passed: one record here, then every rank is told to leave.
template <class Call>
FASTKERN_DEVICE void abort_call(const Call& call, const ErrorRecord& record) {
    ErrorRecord& own = call.control().record;
    const u64 epoch = call.transport.epoch();
    if (call.target.compare_and_swap(&own.state, kNoRecord, kRecordInWork) != kNoRecord)
        return;  // another block of this rank is at it
    own.expected = record.expected;
    own.seen = record.seen;
    own.waited_ns = record.waited_ns;
    own.epoch = epoch;
    own.queue = record.queue;
    own.stage = record.stage;
    own.chunk = record.chunk;
    own.peer = record.peer;
    own.slot = record.slot;
    call.target.store_release(&own.state, kRecordWritten);
    call.transport.raise_abort(epoch << kValueBits | (call.args().rank + 1),
                               call.header().num_ranks);
}

template <class Call>
class Picker {
  public:
    FASTKERN_DEVICE explicit Picker(const Call& call) : call_(call) {}

    // All lanes, once.
    FASTKERN_DEVICE void begin() const {
        Look& look = shared_look();
        const auto& target = call_.target;
        for (u32 k = target.lane(); k < kMostWindow * kNumQueues; k += target.num_lanes()) {
            look.heads[k].item.ticket = ~u64{0};
            look.heads[k].item.stage = 0;
        }
        if (target.lane() == 0) {
            look.last_claimed = ~u64{0};
            look.last_progress_ns = target.now_ns();
            look.last_seen_of_all = 0;
            look.idle_rounds = 0;
            look.looked = 0;
            const u32 lanes = target.num_lanes() / kNumQueues;  // for each queue
            look.open_window = lanes < kLeastWindow  ? kLeastWindow
                               : lanes > kMostWindow ? kMostWindow
                                                     : lanes;
            look.window = look.open_window;
        }
        target.barrier();  // the window, to all lanes
    }

    // All lanes, one for each item.
    FASTKERN_DEVICE void look() const {
        for (u32 k = call_.target.lane(); k < shared_look().window * kNumQueues;
             k += call_.target.num_lanes())
            look_at(k);
    }

    // Lane 0, after a barrier: the runnable head of least plan time, or one after it, claimed.
    FASTKERN_DEVICE void choose(Choice* choice) const {
        Look& look = shared_look();
        call_.transport.progress();
        u32 best = kNumQueues, stuck = kNumQueues;
        u64 claimed = 0;
        for (u32 q = 0; q < kNumQueues; ++q) {
            const Head& head = look.heads[q];
            claimed += head.item.ticket;
            if (head.verdict == kExhausted) continue;
            const bool runs = head.verdict == kCanRun;
            const u32 first = runs ? best : stuck;
            if (first != kNumQueues && head.time >= look.heads[first].time) continue;
            if (runs)
                best = q;
            else
                stuck = q;
        }
        choice->decision = kLookAgain;
        if (call_.transport.aborted() || (best == kNumQueues && stuck == kNumQueues)) {
            choice->decision = kLeave;
        } else if (best != kNumQueues) {
            if (claim(look, best, &choice->item)) choice->decision = kRunItem;
            look.last_progress_ns = 0;
            look.idle_rounds = 0;
        } else {
            look.window = 1;
            wait_a_little(look, claimed, look.heads[stuck].item);
        }
    }

  private:
    const Call& call_;

    FASTKERN_DEVICE Look& shared_look() const { return call_.target.template shared<Look>(); }

    // Where others were faster, the ticket says which item is next: that one, if it was looked at.
    // The head can run. An item without rows, further on, is passed: nobody has to run it.
    FASTKERN_DEVICE bool claim(Look& look, u32 queue, Item* item) const {
        u64* const word = &call_.control().tickets[queue];
        const u32 num_items = look.window * kNumQueues;
        look.window = (look.window + 1) / 2;
        for (u32 k = queue; k < num_items;) {
            const u64 ticket = look.heads[k].item.ticket;
            u64 next = call_.target.compare_and_swap(word, ticket, ticket + 1);
            if (next != ticket) {
                look.window = look.open_window;
            } else if (look.heads[k].verdict == kCanRun) {
                *item = look.heads[k].item;
                return true;
            } else {
                ++next;
            }
            do k += kNumQueues;
            while (k < num_items &&
                   (look.heads[k].item.ticket != next || look.heads[k].verdict < kNoRows));
        }
        return false;
    }

    FASTKERN_DEVICE void look_at(u32 place) const {
        Look& look = shared_look();
        Head& head = look.heads[place];
        if (place == call_.target.lane()) head.best = kNumQueues;
        const u32 queue = place % kNumQueues;
        const u32 ahead = place / kNumQueues;
        u64* const word = &call_.control().tickets[queue];
        for (;;) {
            const u64 ticket = call_.target.load_relaxed(word) + ahead;
            if (ticket >= call_.table().queues[queue].num_items) {
                head.item.ticket = ticket;
                head.verdict = kExhausted;
                return;
            }
            if (head.item.ticket != ticket) {
                locate(queue, ticket, &head.item);
                head.time = item_time(call_.table(), head.item);
            }
            if (head.item.num_rows != 0) break;
            // An item without rows needs no wait and does nothing: whoever sees it passes it, here
            // or when it comes to it in claim().
            head.verdict = kNoRows;
            if (ahead != 0) return;
            call_.target.compare_and_swap(word, ticket, ticket + 1);
        }
        head.verdict = kMustWait;
        // Of the heads of this lane not the first to run, or after one that is not.
        const u32 best = look.heads[call_.target.lane()].best;
        if (best != kNumQueues && best != queue &&
            (ahead != 0 || head.time >= look.heads[best].time))
            return;
        if (!can_run(call_, head.item, nullptr)) return;
        head.verdict = kCanRun;
        if (ahead == 0) look.heads[call_.target.lane()].best = queue;
    }

    // The first stage that ends after the ticket: mostly that of the last look at this place, which
    // is tried first; else among those after it.
    FASTKERN_DEVICE void locate(u32 queue, u64 ticket, Item* item) const {
        const Queue& q = call_.table().queues[queue];
        const Stage* stages = call_.table().stages + q.first_stage;
        u32 low = item->stage, high = q.num_stages;
        for (u32 mid = low; low < high; mid = (low + high) / 2) {
            const Stage& stage = stages[mid];
            if (ticket < stage.first_item + u64{stage.num_chunks} * stage.num_streams)
                high = mid;
            else
                low = mid + 1;
        }
        make_item(call_.table(), queue, low, ticket, item);
    }

    FASTKERN_DEVICE void wait_a_little(Look& look, u64 claimed, const Item& stuck) const {
        const u64 now = call_.target.now_ns();
        if (claimed != look.last_claimed || look.last_progress_ns == 0) {
            look.last_claimed = claimed;
            look.last_progress_ns = now;
            look.idle_rounds = 0;
            look.looked = 0;
        } else if (now - look.last_progress_ns > call_.args().progress_ns / 2) {
            if (look_around(look, now)) give_up(look, stuck, now);
        }
        call_.target.pause(look.idle_rounds++);
    }

    // Half the deadline has passed without a claim here. Waiting long is no fault while other ranks
    // get on: the deadline counts from the last change anywhere, seen by looks half of it apart.
    FASTKERN_DEVICE bool look_around(Look& look, u64 now) const {
        const bool expired = now - look.last_progress_ns > call_.args().progress_ns;
        if (look.looked && !expired) return false;
        const u64 seen = call_.transport.progress_of_all(call_.table().header->num_ranks);
        const bool moved = !look.looked || seen != look.last_seen_of_all;
        look.looked = 1;
        look.last_seen_of_all = seen;
        if (expired && moved) look.last_progress_ns = now - call_.args().progress_ns / 2;
        return expired && !moved;
    }

    FASTKERN_DEVICE void give_up(Look& look, const Item& stuck, u64 now) const {
        ErrorRecord record{};
        if (can_run(call_, stuck, &record) || record.seen >= record.expected) {
            look.last_progress_ns = now;  // it came after all, or is on its way on a slow link
            return;
        }
        record.waited_ns = now - look.last_progress_ns;
        record.queue = stuck.queue;
        record.stage = stuck.stage;
        record.chunk = stuck.chunk;
        abort_call(call_, record);
    }
};

}  // namespace fastkern
