// Combine: expert outputs back to their tokens, summed on the way: by rank, by server, then over
// servers in server order. One row per token and server crosses, as in the dispatch.
//
// Sums are float (double for double values); a product with a weight is rounded before it is added;
// every sum starts with its first term. A rank's sum for a token, over its choices in top-k order,
// is a partial row: it goes to the proxy that brought the token (its own tokens' stay here, and are
// summed on the fly). The proxy adds its server's partial rows by local rank, rounds once to the
// wire's type and puts the row back. The owner adds the servers, its own (never rounded) in its
// place, then the bias, and rounds once.
//
// Who writes what (chunk c; d, l: local ranks): rank d partial rows at proxy l, then pack[d] there;
// partial rows at owners of its server, then push[d]; proxy l send staging, then its own sum flag;
// the put, then arrive; the proxy of the owner's server its windows, then land. Land and take items
// only wait: reduce runs when both queues have been claimed to the end, for whoever claims an item
// has seen its flag, and claims are released and acquired by the queue's ticket.
//
// Example, K = 3, bfloat16, token with slots 256 and 1 on rank 2, and 1 on rank 3, of server 1:
// rank 2 sums 257 for itself, rank 3 sends the proxy 1; the proxy adds 258 and puts it back,
// rounded to bfloat16 (258); the owner has no other server and writes 258.
#pragma once

#include "kernels/body/dispatch.h"
#include "kernels/body/values.h"

namespace fastkern {

// A row of sums: what it adds up, and where it goes.
//   pack, push  this rank's sum for window row `row` of the dispatch, to a partial row of the peer
//   sum         a proxied row: the sums of its server's ranks, to send staging
//   reduce      a token of this rank: the sums of all servers and the bias, to the result
struct SumRow {
    u32 row;
    u32 to_row;
};

enum TermKind : u32 { kSlotTerm, kRankTerm, kServerTerm, kBiasTerm };

// The terms of a row in the order in which they are added: other servers before the own one, in it
// the ranks before the own one, the own rank's slots, the ranks after it; the servers after it; the
// bias. Some are not there: their rows are kNone.
struct TermOrder {
    u32 servers_before, ranks_before, slots, ranks_after, servers_after, bias;

    FASTKERN_DEVICE u32 count() const {
        return servers_before + ranks_before + slots + ranks_after + servers_after + bias;
    }
    // Of the k-th: what it is, and which server, local rank or choice.
    FASTKERN_DEVICE TermKind find(u32 k, u32* which) const {
        const u32 first_rank = servers_before, first_slot = first_rank + ranks_before;
        const u32 next_rank = first_slot + slots, next_server = next_rank + ranks_after;
        const bool slot = k >= first_slot && k < next_rank;
        const bool rank = k >= first_rank && k < next_server;
        *which = k < first_rank   ? k
                 : k < first_slot ? k - first_rank
                 : slot           ? k - first_slot
                 : rank           ? k - next_rank + ranks_before + 1
                                  : k - next_server + servers_before + 1;
        if (slot) return kSlotTerm;
        if (rank) return kRankTerm;
        return k < next_server + servers_after ? kServerTerm : kBiasTerm;
    }
};

// Sums rows; one team each. Lanes look for the terms of a row together, one each, and read what
// others found; then each sums its share of the row's values.
template <class Call, class Sum>
class Combiner {
    using Target = typename Call::Target;
    static constexpr u32 kSumKind = SumKind<Sum>::kKind;
    static constexpr u32 kMany = Target::template kValues<Sum>;

  public:
    FASTKERN_DEVICE Combiner(const Call& call, const RunningItem<Call>& item)
        : call_(call), item_(item) {}

    // Some values at a time; those at the end of the row, or all where rows are not aligned, one by
    // one.
    FASTKERN_DEVICE void sum(const SumRow& row) const {
        const u32 width = static_cast<u32>(call_.moe().width), lanes = call_.target.team_lanes();
        const u32 together = kMany > 1 && aligned() ? width / kMany * kMany : 0;
        const u32 own_row = find_own(row);
        u32 found = find_term(row, own_row, call_.target.team_lane());
        if constexpr (kMany > 1) {
            FASTKERN_ROLLED
            for (u32 first = 0; first < together; first += lanes * kMany)
                sum_values<kMany>(row, own_row, &found, first, together);
        }
        FASTKERN_ROLLED
        for (u32 first = together; first < width; first += lanes)
            sum_values<1>(row, own_row, &found, first, width);
    }

  private:
    const Call& call_;
    const RunningItem<Call>& item_;

    // Rows that move lie at multiples of 16 bytes; are those of the caller where they must?
    FASTKERN_DEVICE bool aligned() const {
        if constexpr (Target::kWide == 0) return true;
        const MoeArgs& moe = call_.moe();
        const u32 caller = static_cast<u32>(reinterpret_cast<u64>(moe.expert_out) |
                                            reinterpret_cast<u64>(moe.result) |
                                            moe.width * value_bytes(moe.value_kind));
        const u32 bias = static_cast<u32>(reinterpret_cast<u64>(moe.bias) | moe.bias_stride);
        return caller % (kMany * value_bytes(moe.value_kind)) == 0 &&
               (!moe.bias || bias % (kMany * value_bytes(moe.bias_kind)) == 0);
    }

    // [M] window row of the own rank, partial row of each other, or kNone; null: the own rank
    // alone.
    FASTKERN_DEVICE const u32* rank_map(const SumRow& row) const {
        const Header& h = call_.header();
        if (item_.queue() == kSum) return call_.handle().touched + u64{row.row} * h.gpus_per_server;
        return server_map(row) + h.servers;
    }
    // [N] window row of each other server's sum, or kNone.
    FASTKERN_DEVICE const u32* server_map(const SumRow& row) const {
        const Header& h = call_.header();
        return call_.handle().token_map + u64{row.row} * (h.servers + h.gpus_per_server);
    }

    // The row of the dispatch's window whose slots the own rank adds, or kNone.
    FASTKERN_DEVICE u32 find_own(const SumRow& row) const {
        if (item_.queue() <= kPush) return row.row;
        return Target::uniform(rank_map(row)[call_.own_local()]);
    }

    FASTKERN_DEVICE TermOrder order_of(u32 own_row) const {
        const Header& h = call_.header();
        const HandleHeader& handle = call_.handle_header();
        const bool reduce = item_.queue() == kReduce, alone = item_.queue() <= kPush;
        TermOrder order;
        order.servers_before = reduce ? h.server : 0;
        order.ranks_before = alone ? 0 : h.local_rank;
        // In the rank layout one output row stands for all choices.
        order.slots = own_row == kNone ? 0 : handle.layout == kRankLayout ? 1 : handle.topk;
        order.ranks_after = alone ? 0 : h.gpus_per_server - 1 - h.local_rank;
        order.servers_after = reduce ? h.servers - 1 - h.server : 0;
        order.bias = reduce && call_.moe().bias;
        return order;
    }

    // Which row the k-th term is, or kNone.
    FASTKERN_DEVICE u32 find_term(const SumRow& row, u32 own_row, u32 k) const {
        const TermOrder order = order_of(own_row);
        if (k >= order.count()) return kNone;
        u32 which;
        switch (order.find(k, &which)) {
            case kSlotTerm:
                if (call_.handle_header().layout == kRankLayout) return own_row;
                return call_.handle()
                    .window_slots[u64{own_row} * call_.handle_header().topk + which];
            case kRankTerm:
                return rank_map(row)[which];
            case kServerTerm:
                return server_map(row)[which];
            default:
                return row.row;
        }
    }

    // Where a term's row lies, and of what kind its values are.
    FASTKERN_DEVICE const u8* locate(TermKind term, u32 at, u32* kind) const {
        const Header& h = call_.header();
        const MoeArgs& moe = call_.moe();
        switch (term) {
            case kSlotTerm:
                *kind = moe.value_kind;
                return moe.expert_out + at * moe.width * value_bytes(moe.value_kind);
            case kRankTerm:
                *kind = kSumKind;
                return call_.own_data() + call_.layout().scratch +
                       (at + (item_.queue() == kSum ? h.scratch_base : 0)) * h.scratch_row_bytes;
            case kServerTerm:
                *kind = moe.wire_kind;
                return call_.own_data() + call_.layout().window + at * h.row_bytes;
            default:
                *kind = moe.bias_kind;
                return moe.bias + at * moe.bias_stride;
        }
    }

    // Where a row of sums goes, and of what kind its values are there.
    FASTKERN_DEVICE u8* destination(const SumRow& row, u32* kind) const {
        const Header& h = call_.header();
        const MoeArgs& moe = call_.moe();
        if (item_.queue() == kReduce) {
            *kind = moe.value_kind;
            return moe.result + row.to_row * moe.width * value_bytes(moe.value_kind);
        }
        if (item_.queue() == kSum) {
            *kind = moe.wire_kind;
            return call_.own_data() + call_.layout().send + row.to_row * h.row_bytes;
        }
        *kind = kSumKind;
        return call_.args().data[call_.table().streams[item_.stream()].peer] +
               call_.layout().scratch + row.to_row * h.scratch_row_bytes;
    }

    // found: the lane's term among the first; read anew where a row has more terms than lanes.
    template <u32 kCount>
    FASTKERN_DEVICE void sum_values(const SumRow& row, u32 own_row, u32* found, u32 begin,
                                    u32 end) const {
        const auto& target = call_.target;
        const u32 lanes = target.team_lanes();
        const u32 count = Target::uniform(order_of(own_row).count());
        const u32 first = begin + target.team_lane() * kCount;
        Values<Target, Sum, kCount> total, server_total, rank_total;
        total.clear();
        server_total.clear();
        rank_total.clear();
        bool any = false;
        FASTKERN_ROLLED
        for (u32 k = 0; k < count; ++k) {
            if (count > lanes && k % lanes == 0)
                *found = find_term(row, own_row, k + target.team_lane());
            call_.forget();
            const u32 at = target.team_read(*found, k % lanes);
            if (at == kNone) continue;
            any = true;
            if (first >= end) continue;
            u32 which, kind;
            const TermKind term = order_of(own_row).find(k, &which);
            const u8* const from = locate(term, at, &kind);
            Values<Target, Sum, kCount> terms;
            terms.load(from + first * value_bytes(kind), kind);
            if (term == kSlotTerm) {
                if (call_.moe().row_weights)
                    terms.multiply(reinterpret_cast<const Sum*>(call_.moe().row_weights)[at]);
                rank_total.add(terms);
                continue;
            }
            server_total.add(rank_total);  // complete, if there is one
            rank_total.clear();
            if (term == kRankTerm) {
                server_total.add(terms);
                continue;
            }
            total.add(server_total);
            server_total.clear();
            total.add(terms);
        }
        if (first >= end) return;
        server_total.add(rank_total);
        total.add(server_total);
        if (!any)  // +0
            for (u32 j = 0; j < kCount; ++j) total.v[j] = Sum{0};
        call_.forget();
        u32 kind;
        u8* const to = destination(row, &kind);
        total.store(to + first * value_bytes(kind), kind);
    }
};

// The rows of one run of an item; pack: one run for each source, as its Arrival record says.
struct SumRun {
    u32 from, to, num_rows;  // rows from `from` on, to rows from `to` on; numbered in 32 bits
};

template <class Call>
FASTKERN_DEVICE SumRun find_run(const Call& call, const RunningItem<Call>& item, u32 run) {
    const Stream& s = call.table().streams[item.stream()];
    const u64 segment_row = call.table().segments[item.first_segment()].row;
    if (item.queue() == kPack) {
        const Arrival& a =
            call.handle().arrivals[(segment_row + item.chunk()) * call.ranks_here() + run];
        return SumRun{
            call.target.uniform(a.window_row),
            static_cast<u32>(call.header().scratch_base) + call.target.uniform(a.partial_row),
            call.target.uniform(a.num_rows)};
    }
    const u32 first = static_cast<u32>(item.first_row());
    SumRun rows{first, first, static_cast<u32>(item.num_rows())};
    if (item.queue() == kReduce) return rows;
    rows.from += static_cast<u32>(item.queue() == kPush ? segment_row : s.source_row);
    rows.to += static_cast<u32>(s.target_row);
    return rows;
}

template <class Sum, class Call>
FASTKERN_DEVICE void combine_sums(const Call& call, const RunningItem<Call>& item) {
    const auto& target = call.target;
    const u32 num_runs = item.queue() == kPack ? call.ranks_here() : 1;
    u32 sent_rows = 0;
    FASTKERN_ROLLED
    for (u32 k = 0; k < num_runs; ++k) {
        const SumRun run = find_run(call, item, k);
        const u32 end = run.from + run.num_rows, distance = run.to - run.from;
        FASTKERN_ROLLED
        for (u32 row = run.from + target.team(); row < end; row += target.num_teams())
            Combiner<Call, Sum>(call, item).sum(SumRow{row, row + distance});
        sent_rows += run.num_rows;
    }
    if (item.queue() == kReduce) return;
    call.forget();
    const Stream& s = call.table().streams[item.stream()];
    signal_after_writes(call, s.peer, s.slot + item.chunk(), kScaleUp,
                        item.queue() <= kPush ? sent_rows * call.header().scratch_row_bytes : 0);
}

// A chunk that came back: to the windows of its tokens' owners, this rank's own too.
template <class Call>
FASTKERN_DEVICE void return_rows(const Call& call, const RunningItem<Call>& item) {
    give_credit(call, item);
    FASTKERN_ROLLED
    for (u32 k = item.first_segment();; ++k) {
        const Stream& s = call.table().streams[item.stream()];
        if (k == s.first_segment + s.num_segments) break;
        const Segment& g = call.table().segments[k];
        const Part part = part_of(g, item);
        if (part.num_rows == 0) break;
        const u64 row_bytes = call.header().row_bytes;
        call.target.copy(
            call.args().data[g.peer] + call.layout().window + part.row * row_bytes,
            call.own_data() + call.layout().receive + (s.source_row + part.stream_row) * row_bytes,
            part.num_rows * row_bytes);
        call.forget();
    }
    signal_destinations(call, item);
}

// Sum: double for double values, else float; a kernel is made for each.
template <class Sum, class Call>
FASTKERN_DEVICE void combine_rows(const Call& call, const RunningItem<Call>& item) {
    if (item.queue() == kPut) return run_put(call, item);
    if (item.queue() == kReceive) return return_rows(call, item);
    if (item.queue() == kLand || item.queue() == kTake) return;  // the wait was all
    combine_sums<Sum>(call, item);
}

}  // namespace fastkern
