#include "kernels/entry/host_counts.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace fastkern {

namespace {

// Sums of counts below it stay below 2^63: there are fewer than 2^24 of them.
constexpr u64 kMostCount = u64{1} << 38;
constexpr u64 kMostExperts = u64{1} << 24;
constexpr u64 kMostAlignment = u64{1} << 32;

template <class... Args>
bool refuse(RefusalText* why, const char* format, Args... args) {
    std::snprintf(why->text, sizeof why->text, format, args...);
    return false;
}

// fastkern/moe/sizes.py says why.
u64 worst_case_rows(const RoutingShape& s, u64 num_own_experts) {
    const u64 most_tokens = s.num_ranks() * s.num_max_tokens;
    if (s.layout == kRankLayout) return num_own_experts ? most_tokens : 0;
    const u64 rows = most_tokens * std::min<u64>(s.topk, num_own_experts);
    if (s.alignment == 1) return rows;
    return ((rows + s.alignment - 1) / s.alignment + num_own_experts) * s.alignment;
}

void check_shape(const RoutingShape& s) {
    if (s.servers < 1 || s.gpus_per_server < 1 || u64{s.servers} * s.gpus_per_server > 65535)
        throw std::invalid_argument("servers * gpus_per_server must be 1 to 65535");
    if (s.rank >= s.num_ranks()) throw std::invalid_argument("rank is not below the ranks");
    if (s.topk > kMostChoices)
        throw std::invalid_argument("topk is at most " + std::to_string(kMostChoices));
    if (s.num_max_tokens < 1 || s.num_max_tokens > (kNone - 1) / std::max(s.topk, 1u))
        throw std::invalid_argument(
            "num_max_tokens must be at least 1, and its choices at most "
            "2^32 - 2, not " +
            std::to_string(s.num_max_tokens));
    if (s.owner.empty() || s.owner.size() > kMostExperts)
        throw std::invalid_argument("owner must have 1 to 2^24 experts");
    for (std::size_t e = 0; e < s.owner.size(); ++e)
        if (s.owner[e] >= s.num_ranks())
            throw std::invalid_argument("owner[" + std::to_string(e) + "] is " +
                                        std::to_string(s.owner[e]) + ", not a rank");
    if (s.local_index.size() != s.owner.size())
        throw std::invalid_argument("local_index must have an entry per expert");
    std::vector<u32> next(s.num_ranks(), 0);
    for (std::size_t e = 0; e < s.owner.size(); ++e)
        if (s.local_index[e] != next[s.owner[e]]++)
            throw std::invalid_argument("local_index[" + std::to_string(e) + "] is " +
                                        std::to_string(s.local_index[e]) +
                                        ": experts of a rank are ordered by id");
    if (s.layout != kExpertLayout && s.layout != kRankLayout)
        throw std::invalid_argument("layout is not one");
    if (s.alignment < 1 || s.alignment > kMostAlignment)
        throw std::invalid_argument("alignment must be 1 to 2^32");
}

}  // namespace

HostCounts::HostCounts(RoutingShape shape) : shape_(std::move(shape)) {
    check_shape(shape_);
    const u64 num_experts = shape_.num_experts();
    const u32 r = shape_.num_ranks();
    first_expert_.assign(r + 1, 0);
    for (const u32 rank : shape_.owner) ++first_expert_[rank + 1];
    for (u32 rank = 0; rank < r; ++rank) first_expert_[rank + 1] += first_expert_[rank];
    by_rank_.resize(num_experts);
    std::vector<u64> next(first_expert_.begin(), first_expert_.end() - 1);
    for (u32 e = 0; e < num_experts; ++e) by_rank_[next[shape_.owner[e]]++] = e;
    for (u32 rank = 0; rank < r; ++rank) room_.push_back(worst_case_rows(shape_, experts_of(rank)));
    per_expert_.resize(num_experts);
    before_.resize(num_experts);
    begin_.resize(num_experts);
}

bool HostCounts::take(const u64* counts, u64 num_tokens, RefusalText* why) {
    counts_ = counts;
    if (num_tokens > shape_.num_max_tokens)
        return refuse(why, "rank %u has %llu tokens, num_max_tokens is %llu", shape_.rank,
                      num_tokens, shape_.num_max_tokens);
    for (u32 source = 0; source < shape_.num_ranks(); ++source)
        if (!take_rank(source, why)) return false;
    const u64* own = to_server(shape_.rank);
    for (u32 b = 0; b < shape_.servers; ++b)
        if (own[b] > num_tokens)
            return refuse(why, "rank %u has %llu tokens, but counts %llu for server %u",
                          shape_.rank, num_tokens, own[b], b);
    return take_rows(why);
}

// What one rank has found can be: its tokens, its choices, and the one against the other.
bool HostCounts::take_rank(u32 source, RefusalText* why) const {
    const u64 most = shape_.num_max_tokens;
    const u64* for_servers = to_server(source);
    for (u32 b = 0; b < shape_.servers; ++b)
        if (for_servers[b] > most)
            return refuse(why, "rank %u counts %llu tokens for server %u, num_max_tokens is %llu",
                          source, for_servers[b], b, most);
    const u64* row = copies(source);
    const u64* for_ranks = to_rank(source);
    u64 all = 0;
    for (u32 d = 0; d < shape_.num_ranks(); ++d) {
        if (for_ranks[d] > most)
            return refuse(why, "rank %u counts %llu tokens for rank %u, num_max_tokens is %llu",
                          source, for_ranks[d], d, most);
        u64 any = 0, sum = 0;
        for (u64 k = first_expert_[d]; k < first_expert_[d + 1]; ++k) {
            any |= row[by_rank_[k]];
            sum += row[by_rank_[k]];
        }
        if (any >= kMostCount || sum < for_ranks[d] || sum > for_ranks[d] * shape_.topk)
            return refuse(why,
                          "rank %u counts %llu tokens for rank %u, and %s%llu choices of its "
                          "experts, of %u a token",
                          source, for_ranks[d], d, any >= kMostCount ? "more than " : "",
                          any >= kMostCount ? kMostCount - 1 : sum, shape_.topk);
        all += sum;
    }
    if (all > most * shape_.topk)
        return refuse(why, "rank %u counts %llu choices, num_max_tokens %llu of %u are %llu",
                      source, all, most, shape_.topk, most * shape_.topk);
    return true;
}

// Rows that ranks receive: within the room that was promised, and within 32 bits.
bool HostCounts::take_rows(RefusalText* why) {
    const u64 num_experts = shape_.num_experts();
    std::fill(per_expert_.begin(), per_expert_.end(), 0);
    for (u32 source = 0; source < shape_.num_ranks(); ++source) {
        if (source == shape_.rank) std::copy(per_expert_.begin(), per_expert_.end(), &before_[0]);
        const u64* row = copies(source);
        u64* sum = per_expert_.data();
        for (u64 e = 0; e < num_experts; ++e) sum[e] += row[e];
    }
    u64 most = 0;
    for (u32 d = 0; d < shape_.num_ranks(); ++d) {
        u64 rows = 0, tokens = 0;
        for (u64 k = first_expert_[d]; k < first_expert_[d + 1]; ++k) {
            const u32 e = by_rank_[k];
            begin_[e] = rows;
            rows += (per_expert_[e] + shape_.alignment - 1) / shape_.alignment * shape_.alignment;
        }
        for (u32 source = 0; source < shape_.num_ranks(); ++source) tokens += to_rank(source)[d];
        if (shape_.layout == kRankLayout) rows = tokens;
        if (rows > room_[d])
            return refuse(why,
                          "rank %u would receive %llu rows, but num_max_tokens %llu makes room "
                          "for %llu",
                          d, rows, shape_.num_max_tokens, room_[d]);
        most = std::max({most, rows, tokens});
    }
    if (most >= kNone) return refuse(why, "%llu rows on one rank, more than 2^32 - 2", most);
    return true;
}

void HostCounts::write_first_rows(const FirstRowArrays& out) const {
    const u32 m = shape_.gpus_per_server, r = shape_.num_ranks();
    const u32 server = shape_.rank / m, local = shape_.rank % m;
    for (u64 e = 0; e < shape_.num_experts(); ++e) out.slot[e] = begin_[e] + before_[e];
    for (u32 d = 0; d < r; ++d) out.window[d] = 0;
    for (u32 source = 0; source < shape_.rank; ++source)
        for (u32 d = 0; d < r; ++d) out.window[d] += to_rank(source)[d];

    const u64* for_servers = to_server(shape_.rank);
    const u64* for_ranks = to_rank(shape_.rank);
    u64 row = 0;
    for (u32 d = 0; d < r; ++d) {
        // Tokens for another server stand at the rank of this one's index there.
        const u32 b = d / m;
        out.list[d] = row;
        row += b == server ? for_ranks[d] : d % m == local ? for_servers[b] : 0;
    }
    row = 0;
    for (u32 b = 0; b < shape_.servers; ++b) {
        out.returned[b] = row;
        row += b == server ? 0 : for_servers[b];
    }
    row = 0;
    for (u32 l = 0; l < m; ++l) {
        out.partial[l] = row;
        row += l == local ? 0 : for_ranks[server * m + l];
    }
    const u64 first = first_expert_[shape_.rank];
    for (u64 k = 0; k < num_own_experts(); ++k)
        out.tokens_per_expert[k] = per_expert_[by_rank_[first + k]];
}

}  // namespace fastkern
