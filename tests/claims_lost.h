// One block between whose look and swaps others claim: what must come of each choice.
#pragma once

#include <array>
#include <random>

#include "tests/claims_ranks.h"
//
#include "kernels/transport/mapped.h"

namespace {

// What happened to claims.
struct Counts {
    u64 heads = 0, later = 0;                     // claimed: the head, an item after it
    u64 unseen = 0, past_window = 0, at_end = 0;  // lost, for that the next item
    u64 unasked = 0;  // unseen, though it can run: its lane asked of another queue
    u64 passed = 0;   // without rows, after the head
    u64 widest = 0;   // window
} counts;

// Before each swap of a ticket other blocks take some items of that queue.
struct Race {
    u64* tickets = nullptr;
    const Queue* queues = nullptr;
    std::vector<u64> faster;  // at each swap
    std::size_t swaps = 0;
};

class RacingTarget : public HostTarget {
  public:
    RacingTarget(HostBlock* block, u32 lane, Race* race)
        : HostTarget(block, 0, lane), race_(race) {}

    void barrier() const {}  // lanes take turns on one thread
    u64 compare_and_swap(u64* p, u64 expected, u64 desired) const {
        const std::ptrdiff_t queue = p - race_->tickets;
        if (queue >= 0 && queue < kNumQueues && race_->swaps < race_->faster.size())
            *p = std::min(*p + race_->faster[race_->swaps++], race_->queues[queue].num_items);
        return HostTarget::compare_and_swap(p, expected, desired);
    }

  private:
    Race* race_;
};

using Times = std::array<u64, kNumQueues>;
constexpr u64 kNever = ~u64{0};

using RacingTransport = MappedTransport<RacingTarget>;
using RacingCall = Call<RacingTarget, RacingTransport>;

// One block alone on a rank whose flags come little by little: each claim against what the rules
// say of it.
class LostClaims {
  public:
    LostClaims(const std::vector<RankFiles>& ranks, u32 rank, u32 num_lanes, u64 seed)
        : heap_(ranks),
          args_(heap_.args_of(ranks[rank], rank, nullptr)),
          table_(view_table(args_.table)),
          tickets_(heap_.view.controls[rank]->tickets),
          random_(seed) {
        block_.num_lanes = num_lanes;
        race_.tickets = tickets_;
        race_.queues = table_.queues;
    }

    void run() {
        each_lane([](const RacingCall& call) {
            call.keep_views();
            Picker<RacingCall>(call).begin();
        });
        CHECK(look().window == open_window());
        while (step()) {
        }
        for (u32 q = 0; q < kNumQueues; ++q) CHECK(tickets_[q] == table_.queues[q].num_items);
    }

  private:
    template <class Body>
    void each_lane(const Body& body, bool first_only = false) {
        for (u32 lane = 0; lane < (first_only ? 1 : block_.num_lanes); ++lane) {
            const RacingTarget target(&block_, lane, &race_);
            const RacingTransport transport(target, args_);
            body(RacingCall{target, transport, &args_});
        }
    }

    Look& look() { return *reinterpret_cast<Look*>(block_.state); }

    u64 open_window() const {
        const u64 lanes = block_.num_lanes / kNumQueues;
        return lanes < 4 ? 4 : lanes > 16 ? 16 : lanes;
    }

    u64 end_of(u32 queue) const { return table_.queues[queue].num_items; }

    Item item_of(u32 queue, u64 ticket) const {
        const Stage* stages = table_.stages + table_.queues[queue].first_stage;
        u32 k = 0;
        while (ticket >= stages[k].first_item + u64{stages[k].num_chunks} * stages[k].num_streams)
            ++k;
        Item item{};
        make_item(table_, queue, k, ticket, &item);
        return item;
    }

    bool has_rows(u32 queue, u64 ticket) const { return item_of(queue, ticket).num_rows != 0; }

    bool runnable(u32 queue, u64 ticket) {
        const Item item = item_of(queue, ticket);
        bool runs = false;
        each_lane([&](const RacingCall& call) { runs = can_run(call, item, nullptr); }, true);
        return runs && item.num_rows != 0;
    }

    // The first to run of some heads. times: of each, or kNever.
    u32 first_of(const Times& times, u32 first, u32 step) const {
        u32 best = kNumQueues;
        for (u32 q = first; q < kNumQueues; q += step)
            if (times[q] != kNever && (best == kNumQueues || times[q] < times[best])) best = q;
        return best;
    }

    bool step() {
        raise_some_flags();
        // Where a queue's head and the items after it are not seen by lanes in that order, items
        // that are passed meanwhile would make gaps, of which the rules here know nothing.
        if (kNumQueues % block_.num_lanes != 0 && block_.num_lanes % kNumQueues != 0)
            pass_heads_without_rows();
        each_lane([](const RacingCall& call) { Picker<RacingCall>(call).look(); });
        const u64 window = look().window;
        counts.widest = std::max(counts.widest, window);
        Times times;
        for (u32 q = 0; q < kNumQueues; ++q) {
            const u64 ticket = tickets_[q];
            const bool runs = ticket < end_of(q) && runnable(q, ticket);
            times[q] = runs ? item_time(table_, item_of(q, ticket)) : kNever;
        }
        const u32 best = first_of(times, 0, 1);
        race_.swaps = 0;
        race_.faster.clear();
        while (race_.faster.size() < 4) race_.faster.push_back(some_claims(window));
        Expected expected;
        if (best != kNumQueues) expected = expect(best, window, times);
        Choice choice{};
        each_lane([&](const RacingCall& call) { Picker<RacingCall>(call).choose(&choice); }, true);
        if (choice.decision == kLeave) return false;
        CHECK(choice.decision == expected.decision);
        CHECK(look().window == expected.window);
        if (best == kNumQueues) return true;
        ++*expected.count;
        CHECK(tickets_[best] == expected.next);
        if (expected.decision == kRunItem)
            CHECK(is_same(choice.item, item_of(best, expected.next - 1)));
        return true;
    }

    static bool is_same(const Item& a, const Item& b) {
        return a.ticket == b.ticket && a.queue == b.queue && a.stage == b.stage &&
               a.stream == b.stream && a.chunk == b.chunk && a.first_row == b.first_row &&
               a.num_rows == b.num_rows && a.first_segment == b.first_segment;
    }

    // What must come of a choice.
    struct Expected {
        u32 decision = kLookAgain;
        u64 window = 1;
        u64 next = 0;          // what the ticket holds
        u64* count = nullptr;  // which it adds to
    };

    // By the rules, where a head can run.
    Expected expect(u32 best, u64 window, const Times& times) {
        const u64 head = tickets_[best], end = end_of(best);
        Expected e;
        e.window = (window + 1) / 2;
        e.next = head;
        for (std::size_t k = 0;; ++k) {
            const u64 ticket = e.next;
            if (k < race_.faster.size()) e.next = std::min(ticket + race_.faster[k], end);
            if (e.next != ticket) {
                e.window = open_window();
            } else {
                ++e.next;
                if (has_rows(best, ticket)) {
                    e.decision = kRunItem;
                    e.count = ticket == head ? &counts.heads : &counts.later;
                    return e;
                }
                ++counts.passed;
            }
            e.count = lost_at(best, e.next, window, times);
            if (e.count) return e;
        }
    }

    // Which count a claim adds to that does not go on to the item; null: it goes on.
    u64* lost_at(u32 queue, u64 ticket, u64 window, const Times& times) {
        if (ticket >= end_of(queue)) return &counts.at_end;
        const u64 ahead = ticket - tickets_[queue];
        if (ahead >= window) return &counts.past_window;
        if (!has_rows(queue, ticket)) return nullptr;
        if (!runnable(queue, ticket)) return &counts.unseen;
        const u32 lane = (ahead * kNumQueues + queue) % block_.num_lanes;
        const u32 asked = first_of(times, lane, block_.num_lanes);
        return asked == kNumQueues || asked == queue ? nullptr : &counts.unasked;
    }

    void pass_heads_without_rows() {
        for (u32 q = 0; q < kNumQueues; ++q)
            while (tickets_[q] < end_of(q) && !has_rows(q, tickets_[q])) ++tickets_[q];
    }

    u64 some_claims(u64 window) {
        if (random_() % 2) return 0;
        return random_() % 4 ? 1 + random_() % 3 : window - 1 + random_() % 2;
    }

    void raise_some_flags() {
        for (u32 k = 0; k < 1 + heap_.num_slots / 16; ++k)
            heap_.view.flags[args_.rank][random_() % heap_.num_slots] = u64{2} << kValueBits;
    }

    Heap heap_;
    KernelArgs args_;
    TableView table_;
    u64* tickets_;
    std::mt19937_64 random_;
    HostBlock block_;
    Race race_;
};

}  // namespace
