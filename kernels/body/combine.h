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
// Example, K = 3, bfloat16, token with slots 256 and 1 on rank 2, and 1 on rank 3, of server 1: rank
// 2 sums 257 for itself, rank 3 sends the proxy 1; the proxy adds 258 and puts it back, rounded to
// bfloat16 (258); the owner has no other server and writes 258.
#pragma once

#include "kernels/body/items.h"
#include "kernels/body/number.h"

namespace fastkern {

// Values that a lane holds at a time.
template <class Target, class Sum>
struct Values {
    Sum v[Target::kValues];
};

// kind: of the values at `from`, those of the sums themselves included.
template <u32 kValues, class Sum>
FASTKERN_DEVICE void load_values(const u8* from, u32 kind, u32 n, Sum* out) {
    const u32 bytes = value_bytes(kind);
    if (n == kValues)
        for (u32 j = 0; j < kValues; ++j) load_value(from + j * bytes, kind, out + j);
    else
        for (u32 j = 0; j < n; ++j) load_value(from + j * bytes, kind, out + j);
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

// Adds terms one after the other.
template <class Target, class Sum>
class Adder {
  public:
    FASTKERN_DEVICE explicit Adder(u32 n) : n_(n) {}

    FASTKERN_DEVICE void add(const Values<Target, Sum>& term) {
        if (empty_)
            sum_ = term;
        else
            for (u32 j = 0; j < n_; ++j) sum_.v[j] = sum_.v[j] + term.v[j];
        empty_ = false;
    }
    FASTKERN_DEVICE void add(const u8* from, u32 kind) {
        Values<Target, Sum> term;
        load_values<Target::kValues>(from, kind, n_, term.v);
        add(term);
    }
    FASTKERN_DEVICE bool empty() const { return empty_; }
    FASTKERN_DEVICE const Values<Target, Sum>& sum() const { return sum_; }
    FASTKERN_DEVICE void store(u8* to, u32 kind) const {
        const u32 bytes = value_bytes(kind);
        for (u32 j = 0; j < n_; ++j) store_value(to + j * bytes, kind, empty_ ? Sum{0} : sum_.v[j]);
    }

  private:
    u32 n_;
    bool empty_ = true;
    Values<Target, Sum> sum_;
};

// What the sums of one item need; values [first, first + n) of a row.
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

    // Calls body(first, n) for the values of a row, this lane's share.
    template <class Body>
    FASTKERN_DEVICE void for_values(const Body& body) const {
        constexpr u64 kValues = Target::kValues;
        for (u64 first = target_.lane() * kValues; first < moe_.width;
             first += target_.num_lanes() * kValues) {
            const u64 left = moe_.width - first;
            body(first, static_cast<u32>(left < kValues ? left : kValues));
        }
    }

    // This rank's sum for a row of the dispatch's window.
    FASTKERN_DEVICE Adder<Target, Sum> rank_sum(u64 window_row, u64 first, u32 n) const {
        Adder<Target, Sum> adder(n);
        if (handle_.header->layout == kRankLayout) {
            add_weighted(window_row, first, n, &adder);
            return adder;
        }
        const u32 topk = handle_.header->topk;
        for (u32 k = 0; k < topk; ++k) {
            const u32 slot = handle_.window_slots[window_row * topk + k];
            if (slot != kNone) add_weighted(slot, first, n, &adder);
        }
        return adder;
    }

    // A row of sums from this rank's expert outputs to a partial row of `rank`.
    FASTKERN_DEVICE void send_partial(u64 window_row, u32 rank, u64 partial_row) const {
        u8* const to = partial(rank, partial_row);
        for_values([&](u64 first, u32 n) {
            rank_sum(window_row, first, n).store(to + first * sizeof(Sum), SumKind<Sum>::kKind);
        });
    }

    // A proxied row: the partial rows of its server, into send staging.
    FASTKERN_DEVICE void sum_server(u64 source_row, u64 target_row) const {
        const u32 m = table_.header->gpus_per_server;
        const u32* const touched = handle_.touched + source_row * m;
        u8* const to =
            args_.data[args_.rank] + layout_.send + target_row * table_.header->row_bytes;
        for_values([&](u64 first, u32 n) {
            Adder<Target, Sum> adder(n);
            for (u32 d = 0; d < m; ++d) {
                if (touched[d] == kNone) continue;
                if (d == args_.rank % m)
                    adder.add(rank_sum(touched[d], first, n).sum());
                else
                    adder.add(partial(args_.rank, table_.header->scratch_base + touched[d]) +
                                  first * sizeof(Sum),
                              SumKind<Sum>::kKind);
            }
            adder.store(to + first * value_bytes(moe_.wire_kind), moe_.wire_kind);
        });
    }

    // A token of this rank: the sums of all servers, and the bias.
    FASTKERN_DEVICE void reduce(u64 token) const {
        const u32 m = table_.header->gpus_per_server, servers = table_.header->servers;
        const u32* const map = handle_.token_map + token * (servers + m);
        const u8* const window = args_.data[args_.rank] + layout_.window;
        const u32 bytes = value_bytes(moe_.value_kind);
        for_values([&](u64 first, u32 n) {
            Adder<Target, Sum> adder(n);
            for (u32 server = 0; server < servers; ++server) {
                if (server == args_.rank / m) {
                    const Adder<Target, Sum> own = own_server(map + servers, first, n);
                    if (!own.empty()) adder.add(own.sum());
                } else if (map[server] != kNone) {
                    adder.add(window + map[server] * table_.header->row_bytes +
                                  first * value_bytes(moe_.wire_kind),
                              moe_.wire_kind);
                }
            }
            if (moe_.bias)
                adder.add(
                    moe_.bias + token * moe_.bias_stride + first * value_bytes(moe_.bias_kind),
                    moe_.bias_kind);
            adder.store(moe_.result + (token * moe_.width + first) * bytes, moe_.value_kind);
        });
    }

    FASTKERN_DEVICE const HandleView& handle() const { return handle_; }

  private:
    FASTKERN_DEVICE u8* partial(u32 rank, u64 row) const {
        return args_.data[rank] + layout_.scratch + row * table_.header->scratch_row_bytes;
    }

    FASTKERN_DEVICE void add_weighted(u64 row, u64 first, u32 n, Adder<Target, Sum>* adder) const {
        const u32 bytes = value_bytes(moe_.value_kind);
        Values<Target, Sum> term;
        load_values<Target::kValues>(moe_.expert_out + (row * moe_.width + first) * bytes,
                                     moe_.value_kind, n, term.v);
        if (moe_.row_weights) {
            const Sum weight = reinterpret_cast<const Sum*>(moe_.row_weights)[row];
            for (u32 j = 0; j < n; ++j) term.v[j] = Target::product(term.v[j], weight);
        }
        adder->add(term);
    }

    // map: [M] of one token.
    FASTKERN_DEVICE Adder<Target, Sum> own_server(const u32* map, u64 first, u32 n) const {
        const u32 m = table_.header->gpus_per_server;
        Adder<Target, Sum> adder(n);
        for (u32 d = 0; d < m; ++d) {
            if (map[d] == kNone) continue;
            if (d == args_.rank % m)
                adder.add(rank_sum(map[d], first, n).sum());
            else
                adder.add(partial(args_.rank, map[d]) + first * sizeof(Sum), SumKind<Sum>::kKind);
        }
        return adder;
    }

    const Target& target_;
    const TableView& table_;
    const KernelArgs& args_;
    const MoeArgs& moe_;
    const HandleView handle_;
    const DataLayout layout_;
};

template <class Sum, class Target, class Transport>
FASTKERN_DEVICE void combine_sums(const Target& target, const Transport& transport,
                                  const TableView& table, const KernelArgs& args,
                                  const Item& item) {
    const Stream& s = table.streams[item.stream];
    const Combiner<Target, Sum> combiner(target, table, args);
    const u32 m = table.header->gpus_per_server;
    const u64 end_row = item.first_row + item.num_rows;
    u64 sent_bytes = 0;
    if (item.queue == kPack) {
        const u64 first = table.segments[item.first_segment].row + item.chunk;
        for (u32 source = 0; source < m; ++source) {
            const Arrival a = combiner.handle().arrivals[first * m + source];
            for (u64 k = 0; k < a.num_rows; ++k)
                combiner.send_partial(a.window_row + k, s.peer,
                                      table.header->scratch_base + a.partial_row + k);
            sent_bytes += a.num_rows * table.header->scratch_row_bytes;
        }
    } else if (item.queue == kPush) {
        const u64 window_row = table.segments[item.first_segment].row;
        for (u64 row = item.first_row; row < end_row; ++row)
            combiner.send_partial(window_row + row, s.peer, s.target_row + row);
        sent_bytes = item.num_rows * table.header->scratch_row_bytes;
    } else if (item.queue == kSum) {
        for (u64 row = item.first_row; row < end_row; ++row)
            combiner.sum_server(s.source_row + row, s.target_row + row);
    } else {
        for (u64 row = item.first_row; row < end_row; ++row) combiner.reduce(row);
        return;
    }
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
