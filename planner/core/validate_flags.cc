// The validator's second part: who writes which flag, who waits for it, and when.
#include <map>

#include "planner/core/table_walk.h"

namespace fastkern {

namespace {

// Slots [begin, end) that one rank may write at another, or at itself.
struct Area {
    u64 begin;
    u64 end;
};

class FlagCheck : public TableWalk {
  public:
    using TableWalk::TableWalk;

    void run() {
        for (u32 r = 0; r < num_ranks(); ++r) {
            post(r);
            for (u32 q = 0; q < kNumQueues; ++q)
                for_each_item_of(r, q, [&](const WalkItem& item) { write_all(item); });
        }
        if (!faults.empty()) return;
        for (u32 r = 0; r < num_ranks(); ++r) {
            for (u32 q = 0; q < kNumQueues; ++q)
                for_each_item_of(r, q, [&](const WalkItem& item) {
                    check_gates(item);
                    check_links(item);
                    for_each_wait(item, [&](u64 slot, u32 writer) { wait(item, slot, 1, writer); });
                });
            check_reduce(r);
        }
        for (const auto& [k, w] : written_)
            // Ready may go unread (by a peer that writes nothing here); nothing else.
            if (k.slot >= num_ranks() && !w.awaited)
                fault(k.rank, "flags",
                      "flag " + std::to_string(k.slot) + " is written but never awaited");
    }

  private:
    struct Key {
        u32 rank;
        u64 slot;
        u32 value;  // above 1 only in credits
        bool operator<(const Key& o) const {
            return rank != o.rank   ? rank < o.rank
                   : slot != o.slot ? slot < o.slot
                                    : value < o.value;
        }
    };
    struct Write {
        u32 writer;
        u64 least_wait;  // plan time from which it may be awaited; 0: kernel start
        bool awaited;
    };
    std::map<Key, Write> written_;

    void write(u32 writer, const char* where, u32 at, u64 slot, u32 value, u64 least_wait) {
        if (!written_.emplace(Key{at, slot, value}, Write{writer, least_wait, false}).second)
            fault(writer, where,
                  "flag " + std::to_string(slot) + " of rank " + std::to_string(at) +
                      " has two writes");
    }

    void post(u32 r) {
        u32 credits = 0;
        for (u32 k = 0; k < views_[r].header->num_posts; ++k) {
            const Post& p = views_[r].posts[k];
            const bool credit = p.slot == flags_.credit(r);
            credits += credit;
            if (!credit && (p.slot != flags_.ready(r) || p.value != 1))
                fault(r, "post", "flag " + std::to_string(p.slot) + " is not its own to post");
            // Inside a server all may write here; from outside, senders: with a credit, or
            // directly.
            const bool local = server_of(p.rank) == server_of(r);
            const bool outside = credit || plan_.policy == kDirect;
            if (p.rank == r || (credit && local) || (!local && !outside))
                fault(r, "post", "to rank " + std::to_string(p.rank) + ", which sends nothing");
            write(r, "post", p.rank, p.slot, p.value, 0);
        }
        if (credits > 1) fault(r, "post", "lets two senders start at once");
    }

    // Where items of a queue raise flags: areas are those of FlagLayout.
    Area area(u32 writer, u32 queue) const {
        const u32 l = local_of(writer);
        switch (queue) {
            case kPack:
                if (plan_.shifted()) return {flags_.pack_direct(0), flags_.arrive(0)};
                return {flags_.pack(l, 0), flags_.pack(l + 1, 0)};
            case kPush:
                return {flags_.push(l), flags_.push(l + 1)};
            case kPut:
                return {flags_.arrive(writer), flags_.arrive(writer + 1)};
            case kReceive:
                return {flags_.land(l, 0), flags_.land(l + 1, 0)};
            default:
                return {flags_.sum(0), flags_.num_slots()};
        }
    }

    void write_all(const WalkItem& item) {
        for_each_signal(item, [&](u32 at, u64 slot) {
            const Area own = area(item.rank, item.queue);
            const u64 first = slot - item.chunk;
            if (first < own.begin || slot >= own.end ||
                (first - own.begin) / flags_.chunk_slots != (slot - own.begin) / flags_.chunk_slots)
                fault(item, "flag " + std::to_string(slot) + " is not this item's to write");
            const bool in_server = item.queue != kPut;
            if ((server_of(at) == server_of(item.rank)) != in_server ||
                (at != item.rank &&
                 (item.queue == kSum || (item.queue == kPack && plan_.shifted()))))
                fault(item, "a flag of rank " + std::to_string(at) + ", which is not a peer");
            write(item.rank, kNames[item.queue], at, slot, 1, item.time + 1);
        });
        if (item.s.credit_slot == kNoSlot || item.s.credit_chunk != item.chunk) return;
        if (item.s.credit_slot != flags_.credit(item.rank))
            fault(item, "a credit in a slot that is not its own");
        write(item.rank, kNames[item.queue], item.s.credit_rank, item.s.credit_slot,
              item.s.credit_value, item.time + 1);
    }

    void wait(const WalkItem& item, u64 slot, u32 value, u32 writer) {
        const auto found = written_.find(Key{item.rank, slot, value});
        if (found == written_.end())
            return fault(item, "flag " + std::to_string(slot) + " value " + std::to_string(value) +
                                   " is awaited but never written");
        Write& w = found->second;
        if (w.least_wait > item.time)
            fault(item, "flag " + std::to_string(slot) + " is written no earlier than awaited");
        if (w.writer != writer)
            fault(item, "flag " + std::to_string(slot) + " is awaited from rank " +
                            std::to_string(writer) + " but written by rank " +
                            std::to_string(w.writer));
        w.awaited = true;
    }

    // A write to a peer without its ready, or with credits a put without one, would reach buffers
    // that are still in use.
    void check_gates(const WalkItem& item) {
        const Stream& s = item.s;
        u32 expected = kNoSlot;
        if (item.queue == kPut && plan_.policy != kDirect) {
            expected = flags_.credit(s.peer);
            if (s.gate_slot != expected)
                return fault(item, "starts without a credit of its receiver");
        } else if (item.queue <= kPut && s.peer != item.rank) {
            expected = flags_.ready(s.peer);
        }
        if (s.gate_slot != expected)
            return fault(item, expected == kNoSlot ? "a gate before what needs none"
                                                   : "writes to rank " + std::to_string(s.peer) +
                                                         " without a gate");
        if (expected != kNoSlot) wait(item, s.gate_slot, s.gate_value, s.peer);
    }

    // A reduce starts when these queues have been claimed to their ends, empty items too.
    void check_reduce(u32 r) {
        const TableView& t = views_[r];
        if (!t.queues[kReduce].num_stages) return;
        const u64 first = plan_time(kReduce, t.stages[t.queues[kReduce].first_stage], 0);
        for (const u32 q : {kLand, kTake})
            for (u32 k = 0; k < t.queues[q].num_stages; ++k) {
                const Stage& stage = t.stages[t.queues[q].first_stage + k];
                if (plan_time(q, stage, stage.num_chunks - 1) >= first)
                    fault(r, "reduce", "is planned no later than rows that it sums land");
            }
    }

    void check_links(const WalkItem& item) {
        if (item.queue != kReceive && item.queue != kSum) {
            if (item.s.num_links) fault(item, "links that nothing follows");
            return;
        }
        std::vector<u8> linked(num_local(), u8{0});
        for_each_link(item, [&](const Link& link) {
            if (server_of(link.rank) != server_of(item.rank) || linked[local_of(link.rank)]++)
                return fault(item, "links rank " + std::to_string(link.rank) +
                                       " twice, or in another server");
            const bool own = link.rank == item.rank;
            if (own && (item.queue == kSum || op() != kCombine)) fault(item, "links its own rank");
            const bool gated = item.queue == kReceive && !own;
            if (link.gate_slot != (gated ? flags_.ready(link.rank) : kNoSlot))
                fault(item, gated
                                ? "writes to rank " + std::to_string(link.rank) + " without a gate"
                                : "a gate before what needs none");
            else if (gated)
                wait(item, link.gate_slot, 1, link.rank);
        });
        // Headers say whom a row is for; a proxy sums what all ranks of its server have.
        const bool all = item.queue == kSum || op() == kDispatch;
        for (u32 j = 0; all && j < num_local(); ++j)
            if (!linked[j] && j != local_of(item.rank))
                fault(item, "misses local rank " + std::to_string(j));
    }
};

}  // namespace

std::vector<std::string> check_flags(const Plan& plan, const Tables& tables,
                                     std::size_t most_faults) {
    FlagCheck check(plan, tables, most_faults);
    check.run();
    return std::move(check.faults);
}

}  // namespace fastkern
