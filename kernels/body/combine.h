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

#include "kernels/body/items.h"
#include "kernels/body/number.h"

namespace fastkern {

// Values that a lane holds at a time. Loops over them have a constant number of rounds, so that
// devices keep them in registers; those past the end of a row are never stored.
template <class Target, class Sum>
struct Values {
    Sum v[Target::kValues];
};

// n values; kind: of those at `from`, that of the sums themselves included.
template <class Target, class Sum>
FASTKERN_DEVICE Values<Target, Sum> load_values(const u8* from, u32 kind, u32 n) {
    const u32 bytes = value_bytes(kind);
    Values<Target, Sum> values;
    if (n == Target::kValues)
        for (u32 j = 0; j < Target::kValues; ++j) load_value(from + j * bytes, kind, values.v + j);
    else
        for (u32 j = 0; j < Target::kValues; ++j)
            load_value(from + (j < n ? j : 0) * bytes, kind, values.v + j);
    return values;
}

template <class Sum>
struct SumKind;
template <>
struct SumKind<float> {
    static constexpr u32 kKind = kFloat32;
};
template <>
struct SumKind<double> {
    static constexpr u32 kKind = kFloat64;
};

// Adds terms one after the other; 0 without any.
template <class Target, class Sum>
class Adder {
  public:
    FASTKERN_DEVICE void add(const Values<Target, Sum>& term) {
        if (empty_)
            sum_ = term;
        else
            for (u32 j = 0; j < Target::kValues; ++j) sum_.v[j] = sum_.v[j] + term.v[j];
        empty_ = false;
    }
    FASTKERN_DEVICE void add(const Adder& other) {
        if (!other.empty_) add(other.sum_);
    }
    FASTKERN_DEVICE void store(u8* to, u32 kind, u32 n) const {
        const u32 bytes = value_bytes(kind);
        for (u32 j = 0; j < Target::kValues; ++j)
            if (j < n) store_value(to + j * bytes, kind, empty_ ? Sum{0} : sum_.v[j]);
    }

  private:
    bool empty_ = true;
    Values<Target, Sum> sum_;
};

// A row of sums: where its terms are, and where it goes.
struct SumRow {
    const u32* local;  // [M] the sum of each local rank, or kNone: of this rank a window row of the
                       // dispatch, of others a partial row; null: this rank alone, own_row
    u64 own_row;       // window row of the dispatch
    u64 first_partial;  // what partial rows are counted from
    const u32* remote;  // [N] window row of each other server's sum, or kNone; null: no other's
    const u8* bias;     // or null
    u8* to;
    u32 kind;  // of the values there
};

// The rows of one item.
template <class Target, class Sum>
class Combiner {
  public:
    FASTKERN_DEVICE Combiner(const Target& target, const TableView& table, const KernelArgs& args)
        : target_(target),
          table_(table),
          args_(args),
          moe_(*args.moe),
          handle_(view_handle(args.moe->handle)),
          layout_(data_layout(*table.header)) {}

    // This rank's sum for a row of the dispatch's window, to a partial row of `rank`.
    FASTKERN_DEVICE SumRow partial_row(u64 window_row, u32 rank, u64 target_row) const {
        return {nullptr, window_row, 0, nullptr, nullptr, partial(rank, target_row), kSumKind};
    }

    // A proxied row: the partial rows of its server, into send staging.
    FASTKERN_DEVICE SumRow server_row(u64 source_row, u64 target_row) const {
        const Header& h = *table_.header;
        return {handle_.touched + source_row * h.gpus_per_server,
                0,
                h.scratch_base,
                nullptr,
                nullptr,
                args_.data[args_.rank] + layout_.send + target_row * h.row_bytes,
                moe_.wire_kind};
    }

    // A token of this rank: the sums of all servers, and the bias.
    FASTKERN_DEVICE SumRow token_row(u64 token) const {
        const Header& h = *table_.header;
        const u32* const map = handle_.token_map + token * (h.servers + h.gpus_per_server);
        return {map + h.servers,
                0,
                0,
                map,
                moe_.bias ? moe_.bias + token * moe_.bias_stride : nullptr,
                moe_.result + token * moe_.width * value_bytes(moe_.value_kind),
                moe_.value_kind};
    }

    // All lanes, each its share of the row's values.
    FASTKERN_DEVICE void sum(const SumRow& row) const {
        constexpr u64 kValues = Target::kValues;
        const u64 stride = target_.num_lanes() * kValues;
        for (u64 first = target_.lane() * kValues; first < moe_.width; first += stride) {
            const u64 left = moe_.width - first;
            const u32 n = static_cast<u32>(left < kValues ? left : kValues);
            sum_of_servers(row, first, n)
                .store(row.to + first * value_bytes(row.kind), row.kind, n);
        }
    }

    FASTKERN_DEVICE const HandleView& handle() const { return handle_; }

  private:
    static constexpr u32 kSumKind = SumKind<Sum>::kKind;

    FASTKERN_DEVICE u8* partial(u32 rank, u64 row) const {
        return args_.data[rank] + layout_.scratch + row * table_.header->scratch_row_bytes;
    }

    // Values [first, first + n) of a row, here and below.
    FASTKERN_DEVICE Adder<Target, Sum> sum_of_servers(const SumRow& row, u64 first, u32 n) const {
        const u32 own = args_.rank / table_.header->gpus_per_server;
        const u32 end = row.remote ? table_.header->servers : own + 1;
        const u8* const window = args_.data[args_.rank] + layout_.window;
        Adder<Target, Sum> adder;
        for (u32 server = row.remote ? 0 : own; server < end; ++server) {
            if (server == own)
                adder.add(sum_of_ranks(row, first, n));
            else if (row.remote[server] != kNone)
                adder.add(load_values<Target, Sum>(
                    window + row.remote[server] * table_.header->row_bytes +
                        first * value_bytes(moe_.wire_kind),
                    moe_.wire_kind, n));
        }
        if (row.bias)
            adder.add(load_values<Target, Sum>(row.bias + first * value_bytes(moe_.bias_kind),
                                               moe_.bias_kind, n));
        return adder;
    }

    FASTKERN_DEVICE Adder<Target, Sum> sum_of_ranks(const SumRow& row, u64 first, u32 n) const {
        const u32 m = table_.header->gpus_per_server, own = args_.rank % m;
        const u32 end = row.local ? m : own + 1;
        Adder<Target, Sum> adder;
        for (u32 d = row.local ? 0 : own; d < end; ++d) {
            const u64 at = row.local ? row.local[d] : row.own_row;
            if (at == kNone) continue;
            if (d == own)
                adder.add(sum_of_slots(at, first, n));
            else
                adder.add(load_values<Target, Sum>(
                    partial(args_.rank, row.first_partial + at) + first * sizeof(Sum), kSumKind,
                    n));
        }
        return adder;
    }

    FASTKERN_DEVICE Adder<Target, Sum> sum_of_slots(u64 window_row, u64 first, u32 n) const {
        const bool one = handle_.header->layout == kRankLayout;  // output row of all its choices
        const u32 topk = one ? 1 : handle_.header->topk;
        Adder<Target, Sum> adder;
        for (u32 k = 0; k < topk; ++k) {
            const u64 slot = one ? window_row : handle_.window_slots[window_row * topk + k];
            if (slot != kNone) adder.add(weighted(slot, first, n));
        }
        return adder;
    }

    FASTKERN_DEVICE Values<Target, Sum> weighted(u64 slot, u64 first, u32 n) const {
        Values<Target, Sum> term = load_values<Target, Sum>(
            moe_.expert_out + (slot * moe_.width + first) * value_bytes(moe_.value_kind),
            moe_.value_kind, n);
        if (moe_.row_weights) {
            const Sum weight = reinterpret_cast<const Sum*>(moe_.row_weights)[slot];
            for (u32 j = 0; j < Target::kValues; ++j)
                term.v[j] = Target::product(term.v[j], weight);
        }
        return term;
    }

    const Target& target_;
    const TableView& table_;
    const KernelArgs& args_;
    const MoeArgs& moe_;
    const HandleView handle_;
    const DataLayout layout_;
};

// One run of rows; pack: one for each source, as its Arrival record says.
template <class Sum, class Target, class Transport>
FASTKERN_DEVICE void combine_sums(const Target& target, const Transport& transport,
                                  const TableView& table, const KernelArgs& args,
                                  const Item& item) {
    const Stream& s = table.streams[item.stream];
    const Combiner<Target, Sum> combiner(target, table, args);
    const u32 num_runs = item.queue == kPack ? table.header->gpus_per_server : 1;
    const u64 segment_row = table.segments[item.first_segment].row;
    u64 sent_bytes = 0;
    for (u32 run = 0; run < num_runs; ++run) {
        u64 from = item.first_row, to = item.first_row, num_rows = item.num_rows;
        if (item.queue == kPack) {
            const Arrival a =
                combiner.handle().arrivals[(segment_row + item.chunk) * num_runs + run];
            from = a.window_row;
            to = table.header->scratch_base + a.partial_row;
            num_rows = a.num_rows;
        } else if (item.queue == kPush) {
            from += segment_row;
            to += s.target_row;
        } else if (item.queue == kSum) {
            from += s.source_row;
            to += s.target_row;
        }
        for (u64 k = 0; k < num_rows; ++k)
            combiner.sum(item.queue == kReduce ? combiner.token_row(from + k)
                         : item.queue == kSum  ? combiner.server_row(from + k, to + k)
                                               : combiner.partial_row(from + k, s.peer, to + k));
        if (item.queue <= kPush) sent_bytes += num_rows * table.header->scratch_row_bytes;
    }
    if (item.queue != kReduce)
        signal_after_writes(target, transport, s.peer, s.slot + item.chunk, kScaleUp, sent_bytes);
}

// A chunk that came back: to the windows of its tokens' owners, this rank's own too.
template <class Target, class Transport>
FASTKERN_DEVICE void return_rows(const Target& target, const Transport& transport,
                                 const TableView& table, const KernelArgs& args, const Item& item) {
    const Stream& s = table.streams[item.stream];
    const DataLayout layout = data_layout(*table.header);
    const u64 row_bytes = table.header->row_bytes;
    give_credit(target, transport, table, item);
    const u8* const from = args.data[args.rank] + layout.receive;
    for (u32 k = item.first_segment; k < s.first_segment + s.num_segments; ++k) {
        const Segment& g = table.segments[k];
        const Part part = part_of(g, item);
        if (part.num_rows == 0) break;
        target.copy(args.data[g.peer] + layout.window + part.row * row_bytes,
                    from + (s.source_row + part.stream_row) * row_bytes, part.num_rows * row_bytes);
    }
    signal_destinations(target, transport, table, item);
}

template <class Target, class Transport>
FASTKERN_DEVICE void combine_rows(const Target& target, const Transport& transport,
                                  const TableView& table, const KernelArgs& args,
                                  const Item& item) {
    switch (item.queue) {
        case kPut:
            return run_put(transport, table, args, item);
        case kReceive:
            return return_rows(target, transport, table, args, item);
        case kLand:
        case kTake:
            return;  // the wait was all
        default:
            if (args.moe->value_kind == kFloat64)
                return combine_sums<double>(target, transport, table, args, item);
            return combine_sums<float>(target, transport, table, args, item);
    }
}

}  // namespace fastkern
