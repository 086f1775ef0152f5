#include "planner/core/plan.h"

#include <algorithm>
#include <stdexcept>

#include "planner/core/balance.h"

namespace fastkern {

const char* policy_name(u32 policy) {
    constexpr const char* kNames[kNumPolicies] = {"whole", "split", "direct", "spreadout"};
    return policy < kNumPolicies ? kNames[policy] : "unknown";
}

namespace {

struct Hash {  // FNV-1a, a word at a time
    u64 value = 1469598103934665603ull;
    void add(u64 word) {
        value = (value ^ word) * 1099511628211ull;
        value ^= value >> 32;
    }
};

u64 hash_inputs(const Plan& p) {
    Hash h;
    const Topology& t = p.topology;
    for (const u64 word :
         {u64{kTableVersion}, u64{t.servers}, u64{t.gpus_per_server}, t.scale_up_cost,
          t.scale_out_cost, t.alpha_ps, u64{t.mesh} | u64{t.cross_rail} << 1, p.options.chunk_bytes,
          u64{p.options.chunk_slots}, u64{p.options.credit_lead}, p.row_bytes, u64{p.policy}})
        h.add(word);
    for (const u64 rows : p.traffic.rows) h.add(rows);
    for (const u64 rows : p.to_rank) h.add(rows);
    return h.value;
}

// Most rows that a rank sends or receives over scale-out without balancing.
u64 direct_load(const Traffic& t) {
    u64 most = 0;
    Vector<u64> in(t.num_ranks, 0);
    for (u32 s = 0; s < t.num_ranks; ++s) {
        u64 out = 0;
        for (u32 d = 0; d < t.num_ranks; ++d) {
            if (s / t.gpus_per_server == d / t.gpus_per_server) continue;
            const u64 rows = t.at(s, d);
            out += rows;
            in[d] += rows;
        }
        most = std::max(most, out);
    }
    for (const u64 rows : in) most = std::max(most, rows);
    return most;
}

Vector<u64> shift_stage_rows(const Traffic& t) {
    Vector<u64> most(t.num_ranks, 0);
    for (u32 s = 0; s < t.num_ranks; ++s)
        for (u32 k = 1; k < t.num_ranks; ++k) {
            const u32 d = (s + k) % t.num_ranks;
            if (s / t.gpus_per_server == d / t.gpus_per_server) continue;
            most[k] = std::max(most[k], t.at(s, d));
        }
    return most;
}

// Up to this many servers `auto` looks at split tiles, and only where whole tiles leave something
// to gain: the decomposition costs more than it saves elsewhere.
constexpr u32 kMostServersForSplit = 8;
// `auto` sends directly when the heaviest rank's puts together take no more than this many alphas.
constexpr u64 kDirectAlphas = 4;

void choose_order(Plan* plan, PolicyChoice choice) {
    const Traffic& t = plan->traffic;
    const u32 n = t.servers;
    const bool automatic = choice == PolicyChoice::kAuto;
    const bool explain = plan->options.explain;
    // Tokens go by same-index peers in every order.
    const bool can_shift =
        plan->topology.cross_rail || plan->moe() || n == 1 || t.gpus_per_server == 1;
    if (!can_shift && (choice == PolicyChoice::kDirect || choice == PolicyChoice::kSpreadout))
        throw std::invalid_argument(
            "direct and spreadout put to ranks of other rails, which this topology has not: "
            "cross_rail is false");
    if (choice == PolicyChoice::kDirect || choice == PolicyChoice::kSpreadout) {
        plan->policy = static_cast<u32>(choice);
        plan->stage_rows = shift_stage_rows(t);
        return;
    }
    if (automatic && can_shift && n > 1 &&
        plan->topology.scale_out_cost <= plan->topology.scale_up_cost) {
        plan->policy = kDirect;
        plan->stage_rows = shift_stage_rows(t);
        if (explain)
            plan->why.push_back(
                "direct: scale-out is as fast as scale-up, balancing gains nothing");
        return;
    }
    const OrderProblem problem = make_order_problem(n, t.gpus_per_server, t.tiles, plan->row_bytes,
                                                    plan->topology, plan->options.chunk_slots);
    u64 longest = 0;  // L in ticks with alpha for one put per stage: no whole order can be shorter
    Vector<u64> column(n, 0);
    for (u32 a = 0; a < n; ++a) {
        u64 row = 0;
        for (u32 b = 0; b < n; ++b) {
            if (!t.tile(a, b)) continue;
            row += problem.ticks(t.tile(a, b));
            column[b] += problem.ticks(t.tile(a, b));
        }
        longest = std::max(longest, row);
    }
    for (const u64 c : column) longest = std::max(longest, c);

    if (automatic && can_shift && n > 1) {
        const u64 most_rows = direct_load(t);
        const u64 direct_ps =
            transfer_ps(most_rows * plan->row_bytes, plan->topology.scale_out_cost);
        // A rank's rows take as long as M times as many tile rows. Planned orders need `longest` at
        // least, and one more hop on each side.
        const u64 ticks =
            mul_div(most_rows, t.gpus_per_server, u64{1} << problem.shift) + problem.alpha_ticks;
        if (direct_ps <= kDirectAlphas * plan->topology.alpha_ps &&
            ticks <= longest + problem.alpha_ticks) {
            plan->policy = kDirect;
            plan->stage_rows = shift_stage_rows(t);
            if (explain)
                plan->why.push_back("direct: the heaviest rank's puts take " +
                                    std::to_string(direct_ps / 1000) + " ns, within " +
                                    std::to_string(kDirectAlphas) + " alphas, and " +
                                    std::to_string(ticks) + " ticks; planned at least " +
                                    std::to_string(longest + problem.alpha_ticks));
            return;
        }
    }

    u64 best = 0;
    if (choice != PolicyChoice::kSplit) {
        plan->policy = kWhole;
        plan->order = order_by_list(problem);
        best = replay(problem, &plan->order);
        if (explain)
            plan->why.push_back("whole by list: " + std::to_string(best) + " ticks, at least " +
                                std::to_string(longest));
        if (best > longest) {
            Vector<Put> other = order_by_assignment(problem);
            const u64 ticks = replay(problem, &other);
            if (explain)
                plan->why.push_back("whole by assignment: " + std::to_string(ticks) + " ticks");
            if (ticks < best) {
                best = ticks;
                plan->order = std::move(other);
            }
        }
        // Close to what is possible, a split does not pay for its extra puts and for planning it.
        const u64 close = longest + longest / (n <= 4 ? 256 : 64);
        if (!automatic || n > kMostServersForSplit || best <= close) return;
    }
    Vector<Put> split;
    try {
        split = order_split(problem, plan->options.chunk_slots / 2);
    } catch (const std::invalid_argument& error) {
        if (!automatic) throw;
        if (explain) plan->why.push_back(error.what());
        return;
    }
    const u64 ticks = replay(problem, &split);
    if (explain) plan->why.push_back("split: " + std::to_string(ticks) + " ticks");
    if (choice == PolicyChoice::kSplit || ticks < best) {
        plan->policy = kSplit;
        plan->order = std::move(split);
    }
}

// Servers in turn, a to a + k at shift k: the order of unbalanced plans of dispatch.
Vector<Put> order_by_shift(const Traffic& t) {
    Vector<Put> order;
    for (u32 k = 1; k < t.servers; ++k)
        for (u32 a = 0; a < t.servers; ++a) {
            const u32 b = (a + k) % t.servers;
            if (t.tile(a, b)) order.push_back({a, b, 0, t.tile(a, b), 0, 0});
        }
    return order;
}

Plan begin_plan(const Topology& topology, u64 row_bytes, const Options& options) {
    if (row_bytes == 0 || row_bytes > (u64{1} << 62))
        throw std::invalid_argument("row_bytes must be 1 to 2^62, not " +
                                    std::to_string(row_bytes));
    if (options.chunk_bytes == 0) throw std::invalid_argument("chunk_bytes must be at least 1");
    if (options.chunk_slots < 2 || options.chunk_slots > 4096)
        throw std::invalid_argument("chunk_slots must be 2 to 4096, not " +
                                    std::to_string(options.chunk_slots));
    Plan plan;
    plan.topology = topology;
    plan.options = options;
    plan.row_bytes = row_bytes;
    return plan;
}

}  // namespace

Plan make_plan(const i64* matrix, const Topology& topology, u64 row_bytes, PolicyChoice choice,
               const Options& options) {
    Plan plan = begin_plan(topology, row_bytes, options);
    plan.traffic = make_traffic(matrix, topology, row_bytes);
    choose_order(&plan, choice);
    plan.hash = hash_inputs(plan);
    return plan;
}

Plan make_moe_plan(const i64* to_server, const i64* to_rank, const Topology& topology,
                   u64 row_bytes, PolicyChoice choice, const Options& options) {
    Plan plan = begin_plan(topology, row_bytes, options);
    plan.traffic = make_token_traffic(to_server, to_rank, topology, row_bytes);
    plan.to_rank.assign(to_rank,
                        to_rank + std::size_t{topology.num_ranks()} * topology.num_ranks());
    choose_order(&plan, choice);
    if (plan.policy == kDirect || plan.policy == kSpreadout) {
        plan.traffic.balanced = false;
        plan.order = order_by_shift(plan.traffic);
        const Traffic& t = plan.traffic;
        const OrderProblem problem = make_order_problem(t.servers, t.gpus_per_server, t.tiles,
                                                        row_bytes, topology, options.chunk_slots);
        replay(problem, &plan.order);
    }
    plan.hash = hash_inputs(plan);
    return plan;
}

std::pair<u64, u64> Plan::staging_rows() const {
    const Traffic& t = traffic;
    if (t.balanced) return {t.max_rail_out, t.max_rail_in};
    u64 most_out = 0, most_in = 0;
    for (u32 a = 0; a < t.servers; ++a)
        for (u32 l = 0; l < t.gpus_per_server; ++l) {
            u64 out = 0, in = 0;
            for (u32 b = 0; b < t.servers; ++b) {
                if (a == b) continue;
                out += t.rail_rows(a, b, l);
                in += t.rail_rows(b, a, l);
            }
            most_out = std::max(most_out, out);
            most_in = std::max(most_in, in);
        }
    return {most_out, most_in};
}

u64 Plan::completion_rows() const {
    const Traffic& t = traffic;
    if (policy == kSpreadout && !moe()) {
        u64 sum = 0;
        for (const u64 rows : stage_rows) sum += rows;
        return sum;
    }
    u64 completion = 0;
    if (policy == kDirect && !moe()) {
        Vector<u64> sender(t.num_ranks, 0), receiver(t.num_ranks, 0);
        for (u32 k = 1; k < t.num_ranks; ++k)
            for (u32 s = 0; s < t.num_ranks; ++s) {
                const u32 d = (s + k) % t.num_ranks;
                if (topology.same_server(s, d)) continue;
                const u64 end = std::max(sender[s], receiver[d]) + t.at(s, d);
                if (t.at(s, d)) sender[s] = receiver[d] = end;
                completion = std::max(completion, end);
            }
        return completion;
    }
    for (u32 l = 0; l < t.gpus_per_server; ++l) {
        Vector<u64> sender(t.servers, 0), receiver(t.servers, 0);
        for (const Put& p : order) {
            const u64 rows = rail_part(p, l).second;
            if (!rows) continue;
            const u64 end = std::max(sender[p.sender], receiver[p.receiver]) + rows;
            sender[p.sender] = receiver[p.receiver] = end;
            completion = std::max(completion, end);
        }
    }
    return completion;
}

std::vector<std::pair<u32, u64>> Plan::puts(u32 rank) const {
    const u32 m = traffic.gpus_per_server, r = traffic.num_ranks;
    std::vector<std::pair<u32, u64>> result;
    if (shifted()) {
        for (u32 k = 1; k < r; ++k) {
            const u32 d = (rank + k) % r;
            if (!topology.same_server(rank, d) && traffic.at(rank, d))
                result.push_back({d, traffic.at(rank, d)});
        }
        return result;
    }
    for (const Put& p : order) {
        if (p.sender != rank / m) continue;
        const u64 rows = rail_part(p, rank % m).second;
        if (rows) result.push_back({p.receiver * m + rank % m, rows});
    }
    return result;
}

u32 Plan::max_puts_per_rank() const {
    Vector<u32> count(traffic.num_ranks, 0);
    const u32 m = traffic.gpus_per_server;
    if (shifted()) {
        for (u32 s = 0; s < traffic.num_ranks; ++s)
            for (u32 d = 0; d < traffic.num_ranks; ++d)
                count[s] += !topology.same_server(s, d) && traffic.at(s, d);
    } else {
        for (const Put& p : order)
            for (u32 l = 0; l < m; ++l) count[p.sender * m + l] += rail_part(p, l).second != 0;
    }
    u32 most = 0;
    for (const u32 c : count) most = std::max(most, c);
    return most;
}

ScaleUpLoad Plan::scale_up_load() const {
    const Traffic& t = traffic;
    const u32 m = t.gpus_per_server;
    ScaleUpLoad load;
    Vector<u64> link(static_cast<std::size_t>(t.num_ranks) * m,
                     0);  // [rank][local destination]
    for (u32 r = 0; r < t.num_ranks; ++r)
        for (u32 j = 0; j < m; ++j)
            if (r % m != j) link[static_cast<std::size_t>(r) * m + j] = t.at(r, r / m * m + j);
    if (!shifted()) {
        TilePieces tile;
        BalanceScratch scratch;
        for (u32 a = 0; a < t.servers; ++a)
            for (u32 b = 0; b < t.servers; ++b) {
                if (!t.tile(a, b)) continue;
                balance_tile(t, a, b, &scratch, &tile);
                for (const Piece& p : tile.pieces) {
                    const std::size_t packed =
                        static_cast<std::size_t>(a * m + p.src_local) * m + p.rail;
                    const std::size_t passed_on =
                        static_cast<std::size_t>(b * m + p.rail) * m + p.dst_local;
                    if (p.src_local != p.rail) link[packed] += p.num_rows;
                    if (p.dst_local != p.rail && !moe()) link[passed_on] += p.num_rows;
                }
            }
    }
    if (moe())  // which rails the rows of a rank came on is not known here: as if on all alike
        for (u32 d = 0; d < t.num_ranks; ++d) {
            u64 rows = 0;
            for (u32 s = 0; s < t.num_ranks; ++s)
                if (!topology.same_server(s, d))
                    rows += to_rank[static_cast<std::size_t>(s) * t.num_ranks + d];
            for (u32 l = 0; l < m; ++l)
                if (l != d % m)
                    link[static_cast<std::size_t>(d / m * m + l) * m + d % m] += rows / m;
        }
    for (u32 s = 0; s < t.servers; ++s)
        for (u32 i = 0; i < m; ++i) {
            u64 out = 0, in = 0;
            for (u32 j = 0; j < m; ++j) {
                const u64 there = link[static_cast<std::size_t>(s * m + i) * m + j];
                out += there;
                in += link[static_cast<std::size_t>(s * m + j) * m + i];
                load.most_link = std::max(load.most_link, there);
            }
            load.most_out = std::max(load.most_out, out);
            load.most_in = std::max(load.most_in, in);
        }
    return load;
}

}  // namespace fastkern
