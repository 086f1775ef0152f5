// What the parts of the validator share: the items of all ranks' tables, what they wait for and
// signal, and faults.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "planner/core/plan.h"

namespace fastkern {

using Tables = std::vector<Vector<u8>>;  // [R], a rank's table each

// An item that holds rows: rows [begin, end) of its stream.
struct WalkItem {
    const TableView& table;
    const Stream& s;
    u32 rank;
    u32 queue;
    u32 chunk;
    u64 time;
    u64 begin;
    u64 end;
};

// Expects tables that check_form has found no fault with.
class TableWalk {
  public:
    TableWalk(const Plan& plan, const Tables& tables, std::size_t most_faults)
        : plan_(plan), traffic_(plan.traffic), most_(most_faults) {
        for (const auto& block : tables) views_.push_back(view_table(block.data()));
        flags_ = {traffic_.num_ranks, traffic_.servers, traffic_.gpus_per_server,
                  plan.options.chunk_slots};
    }

    std::vector<std::string> faults;

  protected:
    static constexpr const char* kNames[kNumQueues] = {"pack", "push", "put", "receive",
                                                       "land", "take", "sum", "reduce"};
    const Plan& plan_;
    const Traffic& traffic_;
    const std::size_t most_;
    FlagLayout flags_{};
    std::vector<TableView> views_;

    u32 op() const { return views_[0].header->op; }
    u32 num_ranks() const { return traffic_.num_ranks; }
    u32 num_local() const { return traffic_.gpus_per_server; }
    u32 server_of(u32 rank) const { return rank / traffic_.gpus_per_server; }
    u32 local_of(u32 rank) const { return rank % traffic_.gpus_per_server; }

    void fault(u32 rank, const char* where, const std::string& text) {
        if (faults.size() < most_)
            faults.push_back("rank " + std::to_string(rank) + " " + where + ": " + text);
    }
    void fault(const WalkItem& item, const std::string& text) {
        fault(item.rank, kNames[item.queue], text);
    }

    // Calls visit(item) for the items of a queue, of one rank or of all, that hold rows: empty ones
    // are passed over, as by a kernel.
    template <class Visit>
    void for_each_item_of(u32 rank, u32 queue, const Visit& visit) {
        const TableView& t = views_[rank];
        for (u32 k = 0; k < t.queues[queue].num_stages; ++k) {
            const Stage& stage = t.stages[t.queues[queue].first_stage + k];
            for (u32 c = 0; c < stage.num_chunks; ++c)
                for (u32 x = 0; x < stage.num_streams; ++x) {
                    const Stream& s = t.streams[stage.first_stream + x];
                    const u64 begin = c * s.chunk_rows;
                    if (begin >= s.num_rows) continue;
                    const WalkItem item{t,     s,
                                        rank,  queue,
                                        c,     plan_time(queue, stage, c),
                                        begin, std::min(s.num_rows, begin + s.chunk_rows)};
                    if (touches(item)) visit(item);
                }
        }
    }
    template <class Visit>
    void for_each_item_of(u32 queue, const Visit& visit) {
        for (u32 r = 0; r < num_ranks(); ++r) for_each_item_of(r, queue, visit);
    }

    // Calls visit(segment, offset, num_rows, stream_row) for the parts of segments in the item:
    // `offset` counts from the start of the segment.
    template <class Visit>
    void for_each_segment(const WalkItem& item, const Visit& visit) const {
        const Segment* g = item.table.segments + item.s.first_segment;
        for (u32 k = 0; k < item.s.num_segments; ++k) {
            const u64 first = std::max(item.begin, g[k].stream_row);
            const u64 last = std::min(item.end, g[k].stream_row + g[k].num_rows);
            if (first < last) visit(g[k], first - g[k].stream_row, last - first, first);
        }
    }

    bool touches(const WalkItem& item, u32 peer = kNoSlot) const {  // kNoSlot: any
        bool found = false;
        for_each_segment(item, [&](const Segment& g, u64, u64, u64) {
            found |= peer == kNoSlot || g.peer == peer;
        });
        return found;
    }

    template <class Visit>
    void for_each_link(const WalkItem& item, const Visit& visit) const {
        for (u32 k = 0; k < item.s.num_links; ++k) visit(item.table.links[item.s.first_link + k]);
    }

    // Calls visit(slot, writer) for the flags of value 1 that the item awaits because of what it
    // reads; gates come on top.
    template <class Visit>
    void for_each_wait(const WalkItem& item, const Visit& visit) const {
        switch (item.queue) {
            case kPut:
                for_each_segment(item, [&](const Segment& g, u64, u64, u64) {
                    visit(u64{g.slot} + item.chunk, g.peer);
                });
                return;
            case kReceive:
            case kLand:
            case kTake:
                return visit(u64{item.s.slot} + item.chunk, item.s.peer);
            case kSum:
                return for_each_link(
                    item, [&](const Link& link) { visit(u64{link.slot} + item.chunk, link.rank); });
            default:
                return;
        }
    }

    // Calls visit(rank, slot) for the flags of value 1 that the item raises; credits come on top. A
    // dispatch's receive has something to tell every rank.
    template <class Visit>
    void for_each_signal(const WalkItem& item, const Visit& visit) const {
        if (item.queue == kReceive)
            for_each_link(item, [&](const Link& link) {
                if (op() == kDispatch || touches(item, link.rank))
                    visit(link.rank, u64{link.slot} + item.chunk);
            });
        else if ((item.queue <= kPut || item.queue == kSum) && item.s.slot != kNoSlot)
            visit(item.s.peer, u64{item.s.slot} + item.chunk);
    }
};

// The parts. Each returns the faults found, at most `most_faults`; the later ones expect that the
// earlier ones found none.

// Sizes and indices: the table can be read without a step outside it, its records lie in order, and
// its header says what the plan and the other ranks say.
std::vector<std::string> check_form(const Plan& plan, const Tables& tables,
                                    std::size_t most_faults);

// Every wait has a producer with a smaller plan time; gates stand before remote writes; one sender
// per receiver at a time; nothing is signalled twice, from a foreign slot, or left unread.
std::vector<std::string> check_flags(const Plan& plan, const Tables& tables,
                                     std::size_t most_faults);

// Every row is delivered once to the right place, after the flag that says it is there; every range
// lies inside its buffer. By operation:
std::vector<std::string> check_all_to_all(const Plan& plan, const Tables& tables,
                                          std::size_t most_faults);
std::vector<std::string> check_dispatch(const Plan& plan, const Tables& tables,
                                        std::size_t most_faults);
// A combine sums what the dispatch left on each rank, so it is read beside the dispatch's tables.
std::vector<std::string> check_combine(const Plan& plan, const Tables& dispatch,
                                       const Tables& tables, std::size_t most_faults);

}  // namespace fastkern
