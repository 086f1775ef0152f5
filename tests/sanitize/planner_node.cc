#include "tests/sanitize/planner_node.h"

#include <algorithm>
#include <thread>

#include "kernels/entry/host_planner.h"

namespace fastkern {

namespace {

constexpr int kRuns = 20;

PlannerShape make_shape(Random& random, const Routing& r) {
    PlannerShape shape;
    RoutingShape& routing = shape.routing;
    routing.servers = r.topology.servers;
    routing.gpus_per_server = r.topology.gpus_per_server;
    routing.rank = static_cast<u32>(random() % r.num_ranks());
    routing.topk = r.topk;
    routing.owner = r.owner;
    routing.local_index = r.local_index;
    routing.layout = r.layout;
    routing.alignment = r.alignment;
    u64 most = 1;
    for (u32 rank = 0; rank < r.num_ranks(); ++rank) most = std::max(most, r.num_tokens(rank));
    routing.num_max_tokens = most * r.topk;  // a token may choose one expert K times
    shape.topology = r.topology;
    shape.options.chunk_bytes = 1 + random() % 500;
    shape.options.credit_lead = static_cast<u32>(random() % 3);
    shape.row_bytes = 48;
    shape.combine_row_bytes = random() % 3 ? 32 : 0;
    shape.partial_row_bytes = shape.combine_row_bytes ? 64 : 0;
    return shape;
}

std::vector<u64> list_counts(const Routing& r, u64 num_tokens) {
    std::vector<u64> counts;
    const auto add = [&counts](const std::vector<i64>& all, u32 rank, u64 width) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(rank * width);
        counts.insert(counts.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
    };
    for (u32 rank = 0; rank < r.num_ranks(); ++rank) {
        add(r.copies, rank, r.num_experts);
        add(r.to_server, rank, r.topology.servers);
        add(r.to_rank, rank, r.num_ranks());
    }
    counts.push_back(num_tokens);
    return counts;
}

bool holds(const std::vector<u8>& out, u64 offset, const Vector<u8>& table) {
    return std::equal(table.begin(), table.end(),
                      out.begin() + static_cast<std::ptrdiff_t>(offset));
}

}  // namespace

std::string run_host_planner(Random& random, const Topology& topology) {
    const Routing r = make_routing(random, topology);
    const PlannerShape shape = make_shape(random, r);
    const u32 rank = shape.routing.rank;
    const bool good = random() % 4 != 0;
    const u64 num_tokens = good ? r.num_tokens(rank) : shape.routing.num_max_tokens + 1;
    const std::vector<u64> counts = list_counts(r, num_tokens);
    HostPlanner planner(shape);
    std::vector<u8> out(planner.layout().bytes);
    planner.bind(counts.data(), out.data());
    const std::size_t blocks = planner.arena_blocks();

    bool refused = false;
    std::thread node([&planner] {
        for (int k = 0; k < kRuns; ++k) HostPlanner::run(&planner);
    });
    while (planner.num_runs() < kRuns) {
        refused |= !planner.error().empty();
        if (random() % 2) planner.clear_error();
        std::this_thread::yield();
    }
    node.join();
    planner.clear_error();
    HostPlanner::run(&planner);
    refused |= !planner.error().empty();
    if (refused == good) return "host planner: " + planner.error();
    if (planner.arena_blocks() != blocks) return "host planner: its arena has grown";

    const std::vector<i64> none(counts.size(), 0);
    const Plan plan = make_moe_plan(good ? r.to_server.data() : none.data(),
                                    good ? r.to_rank.data() : none.data(), topology,
                                    shape.row_bytes, PolicyChoice::kWhole, shape.options);
    if (!holds(out, planner.layout().dispatch_table, lower(plan, rank)))
        return "host planner: the dispatch's table differs";
    if (!shape.partial_row_bytes) return {};
    const u64 num_partials =
        plan.staging_rows().second * std::min(r.topk, topology.gpus_per_server - 1);
    const Vector<u8> combine = lower_combine(
        plan, rank,
        {shape.combine_row_bytes, shape.partial_row_bytes, num_partials, good ? num_tokens : 0});
    if (!holds(out, planner.layout().combine_table, combine))
        return "host planner: the combine's table differs";
    return {};
}

}  // namespace fastkern
