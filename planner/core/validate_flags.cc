// The validator's first half: who writes which flag, who waits for it, and when.
#include <unordered_map>

#include "planner/core/table_walk.h"

namespace fastkern {

namespace {

class FlagCheck : public TableWalk {
  public:
    using TableWalk::TableWalk;

    void run() {
        produce();
        if (faults.empty()) await();
    }

  private:
    std::unordered_map<u64, u64> written_;  // (rank, slot, value) -> plan time + 1
    std::unordered_map<u64, u32> awaited_;  // (rank, slot, value) -> waits

    // Values above 1 occur only in credits; slots are below 2^32 and values below 2^16.
    static u64 key(u32 rank, u32 slot, u32 value) {
        return (u64{rank} << 48) ^ (u64{slot} << 16) ^ value;
    }

    void write(u32 rank, u32 queue, u32 at, u32 slot, u32 value, u64 time) {
        if (at >= traffic_.num_ranks || slot >= flags_.num_slots()) {
            fault(rank, kNames[queue], "a flag lies outside the heap");
            return;
        }
        if (!written_.emplace(key(at, slot, value), time + 1).second)
            fault(rank, kNames[queue],
                  "flag " + std::to_string(slot) + " of rank " + std::to_string(at) +
                      " has two writes");
    }

    void produce() {
        for (u32 r = 0; r < views_.size(); ++r) {
            const TableView& t = views_[r];
            u32 credits = 0;
            for (u32 k = 0; k < t.header->num_posts; ++k) {
                const Post& p = t.posts[k];
                credits += p.slot == flags_.credit(r);
                if (!written_.emplace(key(p.rank, p.slot, p.value), 0).second)
                    fault(r, "post", "flag " + std::to_string(p.slot) + " has two writes");
            }
            if (credits > 1) fault(r, "post", "lets two senders start at once");
            for_each_item(
                r, [&](u32 q, const Stage&, const Stream& s, u32 c, u64 time, u64 begin, u64 end) {
                    if (q == kReceive) {
                        if (s.credit_slot != kNoSlot && s.credit_chunk == c)
                            write(r, q, s.credit_rank, s.credit_slot, s.credit_value, time);
                        for (u32 k = 0; k < s.num_links; ++k) {
                            const Link& link = t.links[s.first_link + k];
                            if (touches(r, s, begin, end, link.rank, false))
                                write(r, q, link.rank, link.slot + c, 1, time);
                        }
                    } else if (q <= kPut && s.slot != kNoSlot &&
                               (q == kPut || touches(r, s, begin, end, 0, true))) {
                        write(r, q, s.peer, s.slot + c, 1, time);
                    }
                });
        }
    }

    void wait(u32 rank, u32 queue, u32 slot, u32 value, u64 time) {
        const auto found = written_.find(key(rank, slot, value));
        if (found == written_.end())
            fault(rank, kNames[queue],
                  "flag " + std::to_string(slot) + " value " + std::to_string(value) +
                      " is awaited but never written");
        else if (found->second > time)  // stored + 1: strictly earlier is <=
            fault(rank, kNames[queue],
                  "flag " + std::to_string(slot) + " is written no earlier than awaited");
        ++awaited_[key(rank, slot, value)];
    }

    void await() {
        for (u32 r = 0; r < views_.size(); ++r) {
            const TableView& t = views_[r];
            for_each_item(r, [&](u32 q, const Stage&, const Stream& s, u32 c, u64 time, u64 begin,
                                 u64 end) {
                const bool holds_rows =
                    q == kPut || q == kReceive || touches(r, s, begin, end, 0, true);
                if (s.gate_slot != kNoSlot && holds_rows)
                    wait(r, q, s.gate_slot, s.gate_value, time);
                if (q == kPut)
                    for_each_segment(r, s, begin, end, [&](const Segment& g, u64, u64, u64) {
                        wait(r, q, g.slot + c, 1, time);
                    });
                if (q >= kReceive && holds_rows) wait(r, q, s.slot + c, 1, time);
                if (q == kReceive)
                    for (u32 k = 0; k < s.num_links; ++k)
                        wait(r, q, t.links[s.first_link + k].gate_slot, 1, time);
                // With credits, each receiver lets one sender start, and each arrival the next one.
                if (q == kPut && plan_.policy != kDirect && s.gate_slot != flags_.credit(s.peer))
                    fault(r, kNames[q], "starts without a credit of its receiver");
                // A write to a peer without a gate would reach buffers that are still in use.
                if ((q == kPack || q == kPush || q == kPut) && s.peer != r &&
                    s.gate_slot == kNoSlot)
                    fault(r, kNames[q],
                          "writes to rank " + std::to_string(s.peer) + " without a gate");
            });
        }
        // Ready may go unread (a peer that writes nothing here); everything else is consumed in its
        // call.
        for (const auto& [k, time] : written_) {
            const u32 slot = static_cast<u32>(k >> 16), rank = static_cast<u32>(k >> 48);
            if (slot >= flags_.num_ranks && !awaited_.count(k))
                fault(rank, "flags",
                      "flag " + std::to_string(slot) + " is written but never awaited");
        }
    }
};

}  // namespace

std::vector<std::string> check_flags(const Plan& plan, const std::vector<std::vector<u8>>& tables,
                                     std::size_t most_faults) {
    FlagCheck check(plan, tables, most_faults);
    check.run();
    return std::move(check.faults);
}

}  // namespace fastkern
