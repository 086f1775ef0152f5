#include "tests/sanitize/moe_case.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

namespace fastkern {

namespace {

// Rows by (expert, source, token, choice), each expert's padded; rank layout: (source, token).
void list_rows(Routing* r) {
    const u32 num_ranks = r->num_ranks();
    r->rows.assign(num_ranks, {});
    const bool by_expert = r->layout == kExpertLayout;
    r->place.assign(num_ranks, std::vector<std::vector<u32>>(num_ranks));
    for (u32 here = 0; here < num_ranks; ++here) {
        std::vector<OutputRow>& rows = r->rows[here];
        for (u32 source = 0; source < num_ranks; ++source)
            r->place[here][source].assign(by_expert ? r->idx[source].size() : r->num_tokens(source),
                                          kNone);
        const auto add = [&](u32 source, u64 token, u32 k) {
            r->place[here][source][by_expert ? token * r->topk + k : token] =
                static_cast<u32>(rows.size());
            rows.push_back({source, token, k});
        };
        for (u32 e = 0; by_expert && e < r->num_experts; ++e) {
            if (r->owner[e] != here) continue;
            for (u32 source = 0; source < num_ranks; ++source)
                for (u64 t = 0; t < r->num_tokens(source); ++t)
                    for (u32 k = 0; k < r->topk; ++k)
                        if (r->expert(source, t, k) == e) add(source, t, k);
            while (rows.size() % r->alignment) rows.push_back({OutputRow::kPadding, 0, 0});
        }
        for (u32 source = 0; !by_expert && source < num_ranks; ++source)
            for (u64 t = 0; t < r->num_tokens(source); ++t)
                for (u32 k = 0; k < r->topk; ++k) {
                    const i64 e = r->expert(source, t, k);
                    if (e < 0 || r->owner[static_cast<u32>(e)] != here) continue;
                    add(source, t, 0);
                    break;
                }
    }
}

void count(Routing* r) {
    const u32 num_ranks = r->num_ranks(), servers = r->topology.servers;
    r->copies.assign(std::size_t{num_ranks} * r->num_experts, 0);
    r->to_server.assign(std::size_t{num_ranks} * servers, 0);
    r->to_rank.assign(std::size_t{num_ranks} * num_ranks, 0);
    for (u32 rank = 0; rank < num_ranks; ++rank)
        for (u64 t = 0; t < r->num_tokens(rank); ++t) {
            std::set<u32> ranks, on_servers;
            for (u32 k = 0; k < r->topk; ++k) {
                const i64 e = r->expert(rank, t, k);
                if (e < 0) continue;
                ++r->copies[rank * r->num_experts + static_cast<u32>(e)];
                ranks.insert(r->owner[static_cast<u32>(e)]);
                on_servers.insert(r->owner[static_cast<u32>(e)] / r->topology.gpus_per_server);
            }
            for (const u32 d : ranks) ++r->to_rank[rank * num_ranks + d];
            for (const u32 s : on_servers) ++r->to_server[rank * servers + s];
        }
}

}  // namespace

Routing make_routing(Random& random, const Topology& topology) {
    Routing r;
    r.topology = topology;
    r.num_experts = 1 + static_cast<u32>(random() % 10);
    r.topk = 1 + static_cast<u32>(random() % (random() % 8 == 0 ? kMostChoices : 5));
    r.layout = random() % 2 ? kExpertLayout : kRankLayout;
    r.alignment = random() % 2 ? 1 : 1 + random() % 5;
    std::vector<u32> owned(topology.num_ranks(), 0);
    for (u32 e = 0; e < r.num_experts; ++e) {
        r.owner.push_back(static_cast<u32>(random() % topology.num_ranks()));
        r.local_index.push_back(owned[r.owner.back()]++);
    }
    const bool hot = random() % 4 == 0;  // all to one expert
    const u64 most = random() % 3 == 0 ? 3 : 24;
    for (u32 rank = 0; rank < topology.num_ranks(); ++rank) {
        std::vector<i64> idx((random() % 5 == 0 ? 0 : random() % most) * r.topk);
        for (i64& e : idx)
            e = random() % 5 == 0 ? -1
                : hot             ? r.num_experts - 1
                                  : static_cast<i64>(random() % r.num_experts);
        r.idx.push_back(std::move(idx));
    }
    list_rows(&r);
    count(&r);
    return r;
}

Bytes Payload::input(u64 part, u32 rank, u64 num_tokens, u64 bytes) const {
    Bytes data(num_tokens * bytes);
    for (u64 k = 0; k < data.size(); ++k) data[k] = byte(rank, part, k / bytes, k % bytes);
    return data;
}

Payload make_payload(Random& random, u32 topk) {
    Payload p;
    p.salt = static_cast<u32>(random());
    p.weight_bytes = static_cast<u32>(random() % 3) * 4;
    u64 at = 0;
    const auto place = [&at](u64 bytes) {
        const u64 here = at;
        at += (bytes + 15) / 16 * 16;
        return here;
    };
    const u64 num_parts = 1 + random() % 3;
    for (u64 k = 0; k < num_parts; ++k) {
        p.part_bytes.push_back(random() % 6 == 0 ? 0 : 1 + random() % 70);
        p.offsets.push_back(place(p.part_bytes.back()));
    }
    p.weights_offset = place(u64{p.weight_bytes} * topk);
    p.header_offset = place(sizeof(RowEntry) * topk);
    p.row_bytes = at;
    return p;
}

std::string check_received(const Routing& r, const Payload& p, u32 rank, const Received& got) {
    const auto fault = [&](const char* what, u64 row) {
        return "rank " + std::to_string(rank) + " received wrong " + what + " in row " +
               std::to_string(row);
    };
    for (u64 row = 0; row < r.rows[rank].size(); ++row) {
        const OutputRow& o = r.rows[rank][row];
        const bool padding = o.source == OutputRow::kPadding;
        for (u64 part = 0; part < p.part_bytes.size(); ++part)
            for (u64 c = 0; c < p.part_bytes[part]; ++c)
                if (got.parts[part][row * p.part_bytes[part] + c] !=
                    (padding ? kUnwritten : p.byte(o.source, part, o.token, c)))
                    return fault("bytes", row);
        const bool by_expert = r.layout == kExpertLayout;
        for (u32 k = by_expert ? o.choice : 0; k < (by_expert ? o.choice + 1 : r.topk); ++k) {
            const i64 e = padding ? -1 : r.expert(o.source, o.token, k);
            const bool here = e >= 0 && r.owner[static_cast<u32>(e)] == rank;
            const u64 at = by_expert ? row : row * r.topk + k;
            for (u32 c = 0; c < p.weight_bytes; ++c)
                if (got.weights[at * p.weight_bytes + c] !=
                    (padding ? kUnwritten
                     : here ? p.byte(o.source, p.part_bytes.size(), o.token, k * p.weight_bytes + c)
                            : 0))
                    return fault("weights", row);
            if (!by_expert &&
                got.index[at] != (here ? u64{r.local_index[static_cast<u32>(e)]} : ~u64{0}))
                return fault("indices", row);
        }
    }
    return {};
}

namespace {

Bytes random_values(Random& random, u64 count, u32 kind) {
    Bytes data(count * value_bytes(kind));
    std::normal_distribution<double> normal;
    for (u64 k = 0; k < count; ++k) {
        u8* const to = data.data() + k * value_bytes(kind);
        if (kind == kFloat64)
            store_value(to, kind, normal(random));
        else
            store_value(to, kind, static_cast<float>(normal(random)));
    }
    return data;
}

template <class Sum>
Sum value(const Bytes& data, u64 index, u32 kind) {
    Sum v;
    load_value(data.data() + index * value_bytes(kind), kind, &v);
    return v;
}

template <class Sum>
void plus(std::optional<Sum>* sum, const std::optional<Sum>& term) {
    if (term) *sum = *sum ? **sum + *term : *term;
}

// One value of a rank's sum for a token.
template <class Sum>
std::optional<Sum> rank_sum(const Routing& r, const Sums& s, u32 peer, u32 source, u64 token,
                            u64 column) {
    const std::vector<u32>& place = r.place[peer][source];
    const u32 choices = r.layout == kExpertLayout ? r.topk : 1;
    std::optional<Sum> sum;
    for (u32 k = 0; k < choices; ++k) {
        const u32 row = place[token * choices + k];
        if (row == kNone) continue;
        Sum term = value<Sum>(s.expert_out[peer], row * s.width + column, s.value_kind);
        const u32 weight_kind = s.wide() ? kFloat64 : kFloat32;
        if (s.weighted) term = term * value<Sum>(s.weights[peer], row, weight_kind);
        plus(&sum, std::optional<Sum>(term));
    }
    return sum;
}

template <class Sum>
Sum token_sum(const Routing& r, const Sums& s, u32 rank, u64 token, u64 column) {
    const u32 m = r.topology.gpus_per_server;
    std::optional<Sum> total;
    for (u32 server = 0; server < r.topology.servers; ++server) {
        std::optional<Sum> sum;
        for (u32 peer = server * m; peer < (server + 1) * m; ++peer)
            plus(&sum, rank_sum<Sum>(r, s, peer, rank, token, column));
        if (sum && server != rank / m) {
            u8 wire[8];
            store_value(wire, s.wire_kind, *sum);
            Sum rounded;
            load_value(wire, s.wire_kind, &rounded);
            sum = rounded;
        }
        plus(&total, sum);
    }
    if (s.bias_rows) {
        const u64 row = s.bias_rows == 2 ? token : 0;
        plus(&total,
             std::optional<Sum>(value<Sum>(s.bias[rank], row * s.width + column, s.bias_kind)));
    }
    return total.value_or(Sum{0});
}

}  // namespace

Sums make_sums(Random& random, const Routing& r) {
    Sums s;
    s.width = random() % 10 == 0 ? 0 : 1 + random() % (random() % 4 == 0 ? 150 : 40);
    s.value_kind = static_cast<u32>(random() % kNumValueKinds);
    const u32 sum_kind = s.wide() ? kFloat64 : kFloat32;
    s.wire_kind = random() % 2 ? s.value_kind : sum_kind;
    s.weighted = random() % 2;
    s.bias_rows = static_cast<u32>(random() % 3);
    s.bias_kind = s.wide() ? kFloat64 : 1 + static_cast<u32>(random() % 3);
    for (u32 rank = 0; rank < r.num_ranks(); ++rank) {
        const u64 rows = r.rows[rank].size();
        s.expert_out.push_back(random_values(random, rows * s.width, s.value_kind));
        s.weights.push_back(random_values(random, s.weighted ? rows : 0, sum_kind));
        const u64 bias_rows = s.bias_rows == 2 ? r.num_tokens(rank) : s.bias_rows;
        s.bias.push_back(random_values(random, bias_rows * s.width, s.bias_kind));
    }
    return s;
}

std::string check_result(const Routing& r, const Sums& s, u32 rank, const Bytes& result) {
    const u32 bytes = value_bytes(s.value_kind);
    for (u64 k = 0; k < r.num_tokens(rank) * s.width; ++k) {
        u8 expected[8];
        if (s.wide())
            store_value(expected, s.value_kind,
                        token_sum<double>(r, s, rank, k / s.width, k % s.width));
        else
            store_value(expected, s.value_kind,
                        token_sum<float>(r, s, rank, k / s.width, k % s.width));
        if (std::memcmp(expected, result.data() + k * bytes, bytes) != 0)
            return "rank " + std::to_string(rank) + ": wrong sum for token " +
                   std::to_string(k / s.width) + ", column " + std::to_string(k % s.width);
    }
    return {};
}

}  // namespace fastkern
