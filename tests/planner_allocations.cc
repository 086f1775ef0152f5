// Counts what planning asks of the heap: a planner as a host node on random counts, and plans and
// tables in an arena. Every function that gives out memory is replaced by one that counts.
//
// Usage: planner_allocations SERVERS GPUS_PER_SERVER RUNS SEED
// Prints: the allocations of all runs of the host node; of planning again the counts that an arena
// was warmed with, by all policies; and of the same on the heap, which is never 0.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "kernels/entry/host_planner.h"

namespace {

std::atomic<unsigned long long> num_allocations{0};

}  // namespace

// What glibc's own functions are called: operator new and the C++ library end up here as well.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
    ++num_allocations;
    return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
    ++num_allocations;
    return __libc_calloc(count, bytes);
}
void* realloc(void* old, std::size_t bytes) {
    ++num_allocations;
    return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
    ++num_allocations;
    return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** result, std::size_t alignment, std::size_t bytes) {
    *result = memalign(alignment, bytes);
    return *result ? 0 : 12;
}
}

using namespace fastkern;

namespace {

using Random = std::mt19937_64;

PlannerShape make_shape(u32 servers, u32 per_server) {
    PlannerShape shape;
    RoutingShape& r = shape.routing;
    r.servers = shape.topology.servers = servers;
    r.gpus_per_server = shape.topology.gpus_per_server = per_server;
    r.num_max_tokens = 40;
    r.topk = 4;
    for (u32 e = 0; e < 2 * r.num_ranks(); ++e) {
        r.owner.push_back(e / 2);
        r.local_index.push_back(e % 2);
    }
    shape.topology.scale_up_cost = 2276;
    shape.topology.scale_out_cost = 20480;
    shape.topology.alpha_ps = 5'000'000;
    shape.row_bytes = 64;
    shape.combine_row_bytes = 32;
    shape.partial_row_bytes = 64;
    return shape;
}

// One choice of each token for each of K experts near a hot one; then the rank's own tokens.
void fill_counts(const RoutingShape& r, Random& random, std::vector<u64>* counts) {
    const u64 width = r.count_words();
    counts->assign(width * r.num_ranks() + 1, 0);
    const u64 spread = 1 + random() % r.num_experts();
    const u64 hot = random() % r.num_experts();
    for (u32 s = 0; s < r.num_ranks(); ++s) {
        u64* copies = counts->data() + s * width;
        const u64 tokens = random() % 3 ? random() % (r.num_max_tokens + 1) : 0;
        if (s == r.rank) counts->back() = tokens;
        for (u64 t = 0; t < tokens; ++t) {
            std::vector<u8> ranks(r.num_ranks(), 0), servers(r.servers, 0);
            for (u32 k = 0; k < r.topk && k < 2; ++k) {  // no more than an expert's room
                const u64 e = (hot + random() % spread) % r.num_experts();
                ++copies[e];
                ranks[r.owner[e]] = servers[r.owner[e] / r.gpus_per_server] = 1;
            }
            for (u32 b = 0; b < r.servers; ++b) copies[r.num_experts() + b] += servers[b];
            for (u32 d = 0; d < r.num_ranks(); ++d)
                copies[r.num_experts() + r.servers + d] += ranks[d];
        }
    }
}

// Allocations of `runs` runs on threads that have not planned before; exits where one fails.
u64 count_host_node(const PlannerShape& shape, int runs, Random& random) {
    HostPlanner planner(shape);
    std::vector<u64> counts(shape.routing.count_words() * shape.routing.num_ranks() + 1);
    std::vector<u8> out(planner.layout().bytes);
    planner.bind(counts.data(), out.data());
    std::vector<u64> next;
    u64 total = 0;
    for (int k = 0; k < runs; ++k) {
        fill_counts(shape.routing, random, &next);
        std::copy(next.begin(), next.end(), counts.begin());
        const auto run = [&] {
            const u64 before = num_allocations;
            HostPlanner::run(&planner);
            total += num_allocations - before;
        };
        if (k % 100 == 0)
            std::thread(run).join();
        else
            run();
        if (planner.error().empty()) continue;
        std::printf("run %d: %s\n", k, planner.error().c_str());
        std::exit(1);
    }
    return total;
}

// Allocations of planning and lowering once more what was planned in the same arena; nullptr: heap.
u64 count_planning(const PlannerShape& shape, Arena* arena, Random& random) {
    const RoutingShape& r = shape.routing;
    std::vector<u64> counts;
    fill_counts(r, random, &counts);
    std::vector<i64> to_server, to_rank;
    for (u32 s = 0; s < r.num_ranks(); ++s) {
        const u64* row = counts.data() + s * r.count_words() + r.num_experts();
        to_server.insert(to_server.end(), row, row + r.servers);
        to_rank.insert(to_rank.end(), row + r.servers, row + r.servers + r.num_ranks());
    }
    Options options;
    options.explain = false;
    u64 total = 0;
    for (u32 policy = 0; policy <= static_cast<u32>(PolicyChoice::kAuto); ++policy)
        for (int pass = 0; pass < 2; ++pass) {
            const u64 before = num_allocations;
            if (arena) arena->reset();
            const ArenaScope scope(arena);
            const Plan plan =
                make_moe_plan(to_server.data(), to_rank.data(), shape.topology, shape.row_bytes,
                              static_cast<PolicyChoice>(policy), options);
            for (u32 rank = 0; rank < r.num_ranks(); ++rank) {
                const Vector<u8> dispatch = lower(plan, rank);
                const Vector<u8> combine = lower_combine(plan, rank, {32, 64, 100, 20});
            }
            if (pass == 1) total += num_allocations - before;
        }
    return total;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    const PlannerShape shape =
        make_shape(static_cast<u32>(std::atoi(argv[1])), static_cast<u32>(std::atoi(argv[2])));
    Random random(static_cast<u64>(std::atoll(argv[4])));
    Arena arena;
    const u64 node = count_host_node(shape, std::atoi(argv[3]), random);
    const u64 in_arena = count_planning(shape, &arena, random);
    std::printf("%llu %llu %llu\n", node, in_arena, count_planning(shape, nullptr, random));
    return 0;
}
