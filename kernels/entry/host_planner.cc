#include "kernels/entry/host_planner.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "planner/core/order.h"
#include "planner/core/table_room.h"

namespace fastkern {

namespace {

PlannerShape checked(PlannerShape shape) {
    const RoutingShape& r = shape.routing;
    if (r.servers != shape.topology.servers || r.gpus_per_server != shape.topology.gpus_per_server)
        throw std::invalid_argument("routing and topology have different ranks");
    if (shape.partial_row_bytes && !shape.combine_row_bytes)
        throw std::invalid_argument("combine_row_bytes must be at least 1 where sums have bytes");
    shape.options.explain = false;
    return shape;
}

u64 round_up(u64 n, u64 to) { return (n + to - 1) / to * to; }

PlannerLayout make_layout(const PlannerShape& shape, u64 num_own_experts) {
    const RoutingShape& r = shape.routing;
    PlannerLayout a;
    u64 end = 0;
    const auto place = [&end](u64 words) {
        const u64 begin = end;
        end = round_up(end + words * sizeof(u64), 16);
        return begin;
    };
    a.slot_base = place(r.num_experts());
    a.window_base = place(r.num_ranks());
    a.list_base = place(r.num_ranks());
    a.return_base = place(r.servers);
    a.partial_base = place(r.gpus_per_server);
    a.tokens_per_expert = place(num_own_experts);
    a.dispatch_room = most_bytes_of_dispatch(r.servers, r.gpus_per_server);
    if (shape.partial_row_bytes)
        a.combine_room = most_bytes_of_combine(r.servers, r.gpus_per_server);
    a.dispatch_table = round_up(end, 256);
    a.combine_table = round_up(a.dispatch_table + a.dispatch_room, 256);
    a.bytes = round_up(a.combine_table + a.combine_room, 256);
    return a;
}

}  // namespace

HostPlanner::HostPlanner(PlannerShape shape)
    : shape_(checked(std::move(shape))),
      counts_(shape_.routing),
      layout_(make_layout(shape_, counts_.num_own_experts())) {
    plan_nothing();
    warm_up();
    arena_blocks_ = arena_.num_blocks_ever();
}

void HostPlanner::bind(const u64* counts, u8* out) {
    if (!counts || reinterpret_cast<std::uintptr_t>(counts) % alignof(u64))
        throw std::invalid_argument("counts must be at a multiple of 8");
    if (!out || reinterpret_cast<std::uintptr_t>(out) % 16)
        throw std::invalid_argument("out must be at a multiple of 16");
    const std::lock_guard<std::mutex> lock(running_);
    input_ = counts;
    out_ = out;
}

std::string HostPlanner::error() const {
    RefusalText copy;
    {
        const std::lock_guard<std::mutex> lock(telling_);
        copy = error_;
    }
    return copy.text;
}

void HostPlanner::clear_error() {
    const std::lock_guard<std::mutex> lock(telling_);
    error_ = {};
}

void HostPlanner::keep_error(const char* text) noexcept {
    const std::lock_guard<std::mutex> lock(telling_);
    if (!error_.text[0]) std::snprintf(error_.text, sizeof error_.text, "%s", text);
}

void HostPlanner::run(void* self) noexcept { static_cast<HostPlanner*>(self)->run_once(); }

void HostPlanner::run_once() noexcept {
    const std::lock_guard<std::mutex> lock(running_);
    RefusalText why;
    bool planned = false;
    try {
        if (!out_) throw std::logic_error("run before bind");
        arena_.reset();
        planned = plan_counts(&why);
    } catch (const std::exception& error) {
        std::snprintf(why.text, sizeof why.text, "%s", error.what());
    } catch (...) {
        std::snprintf(why.text, sizeof why.text, "an exception of unknown type");
    }
    if (!planned) {
        keep_error(why.text);
        if (out_) {
            std::memset(out_, 0, layout_.dispatch_table);  // all first rows
            write_tables(nothing_dispatch_.data(), nothing_dispatch_.size(),
                         nothing_combine_.data(), nothing_combine_.size());
        }
    }
    arena_blocks_.store(arena_.num_blocks_ever(), std::memory_order_relaxed);
    num_runs_.fetch_add(1, std::memory_order_release);
}

// Writes first rows and tables; false, with the reason and nothing written, where it must not.
bool HostPlanner::plan_counts(RefusalText* why) {
    const RoutingShape& r = shape_.routing;
    const ArenaScope scope(&arena_);
    const u64 num_tokens = input_[r.num_ranks() * r.count_words()];
    if (!counts_.take(input_, num_tokens, why)) return false;
    Vector<i64> to_server, to_rank;
    to_server.reserve(std::size_t{r.num_ranks()} * r.servers);
    to_rank.reserve(std::size_t{r.num_ranks()} * r.num_ranks());
    for (u32 s = 0; s < r.num_ranks(); ++s) {
        const u64 *servers = counts_.to_server(s), *ranks = counts_.to_rank(s);
        to_server.insert(to_server.end(), servers, servers + r.servers);
        to_rank.insert(to_rank.end(), ranks, ranks + r.num_ranks());
    }
    const Tables tables = make_tables(to_server.data(), to_rank.data(), num_tokens);
    if (tables.dispatch.size() > layout_.dispatch_room ||
        tables.combine.size() > layout_.combine_room)
        throw std::logic_error("a table is larger than any can be");
    if (!tables.combine.empty()) {
        const u64 rows = view_table(tables.combine.data()).header->scratch_rows;
        if (rows >= kNone) {
            std::snprintf(why->text, sizeof why->text,
                          "combine: %llu partial rows on one rank, 2^32 - 1 or more", rows);
            return false;
        }
    }
    const auto words = [this](u64 offset) { return reinterpret_cast<u64*>(out_ + offset); };
    counts_.write_first_rows({words(layout_.slot_base), words(layout_.window_base),
                              words(layout_.list_base), words(layout_.return_base),
                              words(layout_.partial_base), words(layout_.tokens_per_expert)});
    write_tables(tables.dispatch.data(), tables.dispatch.size(), tables.combine.data(),
                 tables.combine.size());
    return true;
}

HostPlanner::Tables HostPlanner::make_tables(const i64* to_server, const i64* to_rank,
                                             u64 num_tokens) const {
    const Plan plan = make_moe_plan(to_server, to_rank, shape_.topology, shape_.row_bytes,
                                    PolicyChoice::kWhole, shape_.options);
    const RoutingShape& r = shape_.routing;
    Tables tables;
    tables.dispatch = lower(plan, r.rank);
    if (shape_.partial_row_bytes) {
        // As a handle's most_partials: of every row that a proxy brings, one to each other rank of
        // its server that the token can have chosen.
        const u64 num_partials =
            plan.staging_rows().second * std::min(r.topk, r.gpus_per_server - 1);
        tables.combine = lower_combine(
            plan, r.rank,
            {shape_.combine_row_bytes, shape_.partial_row_bytes, num_partials, num_tokens});
    }
    return tables;
}

void HostPlanner::write_tables(const u8* dispatch, u64 dispatch_bytes, const u8* combine,
                               u64 combine_bytes) {
    std::memcpy(out_ + layout_.dispatch_table, dispatch, dispatch_bytes);
    if (combine_bytes) std::memcpy(out_ + layout_.combine_table, combine, combine_bytes);
}

void HostPlanner::plan_nothing() {
    const u64 r = shape_.routing.num_ranks();
    const Vector<i64> to_server(r * shape_.routing.servers, 0), to_rank(r * r, 0);
    const Tables tables = make_tables(to_server.data(), to_rank.data(), 0);
    nothing_dispatch_.assign(tables.dispatch.begin(), tables.dispatch.end());
    nothing_combine_.assign(tables.combine.begin(), tables.combine.end());
}

// The planner's vectors have sizes that follow from the shape or are reserved for the most that
// they can hold, so that a run at capacity makes each of them. What it may not make, and another
// run may, is added: the order by assignments, orders sorted into new vectors, larger tables.
void HostPlanner::warm_up() {
    const RoutingShape& r = shape_.routing;
    const u32 n = r.servers;
    arena_.reset();
    {
        const ArenaScope scope(&arena_);
        const i64 most = static_cast<i64>(r.num_max_tokens);
        const Vector<i64> to_server(u64{r.num_ranks()} * n, most);
        const Vector<i64> to_rank(u64{r.num_ranks()} * r.num_ranks(), most);
        const Tables tables = make_tables(to_server.data(), to_rank.data(), r.num_max_tokens);
        Vector<u64> tiles(u64{n} * n, 1);
        for (u32 s = 0; s < n; ++s) tiles[u64{s} * n + s] = 0;
        const OrderProblem problem =
            make_order_problem(n, r.gpus_per_server, tiles, shape_.row_bytes, shape_.topology,
                               shape_.options.chunk_slots);
        Vector<Put> by_assignment = order_by_assignment(problem);
        replay(problem, &by_assignment);
        Vector<Put> sorted_list, sorted_assignment;
        sorted_list.reserve(by_assignment.size());
        sorted_assignment.reserve(by_assignment.size());
        const Vector<u8> more_dispatch(layout_.dispatch_room - tables.dispatch.size());
        const Vector<u8> more_combine(layout_.combine_room - tables.combine.size());
    }
    arena_.reserve(arena_.used_bytes());
}

}  // namespace fastkern
