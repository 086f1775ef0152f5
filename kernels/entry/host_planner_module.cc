#include "kernels/entry/host_planner_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "kernels/entry/host_planner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastkern {

namespace {

nb::dict layout_dict(const PlannerLayout& layout) {
    nb::dict d;
#define FASTKERN_PLANNER_OFFSET(name) d[#name] = layout.name;
    FASTKERN_PLANNER_LAYOUT_FIELDS(FASTKERN_PLANNER_OFFSET)
#undef FASTKERN_PLANNER_OFFSET
    return d;
}

}  // namespace

void bind_planner(nb::module_& m) {
    nb::class_<HostPlanner>(m, "HostPlanner")
        .def(
            "__init__",
            [](HostPlanner* self, u32 servers, u32 gpus_per_server, u64 scale_up_cost,
               u64 scale_out_cost, u64 alpha_ps, bool mesh, bool cross_rail, u64 chunk_bytes,
               u32 chunk_slots, u32 credit_lead, u32 rank, u64 num_max_tokens, u32 topk,
               u64 num_experts, std::vector<u32> owner, const std::vector<u32>& local_index,
               u32 layout, u64 alignment, u64 row_bytes, u64 combine_row_bytes,
               u64 partial_row_bytes) {
                if (owner.size() != num_experts)
                    throw std::invalid_argument("owner must have num_experts entries");
                PlannerShape shape;
                shape.routing = {servers,          gpus_per_server, rank,   num_max_tokens, topk,
                                 std::move(owner), local_index,     layout, alignment};
                shape.topology = {servers, gpus_per_server, scale_up_cost, scale_out_cost, alpha_ps,
                                  mesh,    cross_rail};
                shape.options = {chunk_bytes, chunk_slots, credit_lead};
                shape.row_bytes = row_bytes;
                shape.combine_row_bytes = combine_row_bytes;
                shape.partial_row_bytes = partial_row_bytes;
                new (self) HostPlanner(std::move(shape));
            },
            nb::kw_only(), "servers"_a, "gpus_per_server"_a, "scale_up_cost"_a, "scale_out_cost"_a,
            "alpha_ps"_a, "mesh"_a, "cross_rail"_a, "chunk_bytes"_a, "chunk_slots"_a,
            "credit_lead"_a, "rank"_a, "num_max_tokens"_a, "topk"_a, "num_experts"_a, "owner"_a,
            "local_index"_a, "layout"_a, "alignment"_a, "row_bytes"_a, "combine_row_bytes"_a = 0,
            "partial_row_bytes"_a = 0)
        .def_prop_ro("layout", [](const HostPlanner& p) { return layout_dict(p.layout()); })
        // What a host node is made with: the function, and its argument.
        .def_prop_ro(
            "function",
            [](const HostPlanner&) { return reinterpret_cast<std::uintptr_t>(&HostPlanner::run); })
        .def_prop_ro("data",
                     [](const HostPlanner& p) { return reinterpret_cast<std::uintptr_t>(&p); })
        .def_prop_ro("num_runs", &HostPlanner::num_runs)
        .def_prop_ro("arena_blocks", &HostPlanner::arena_blocks)
        .def_prop_ro("error", &HostPlanner::error)
        .def("clear_error", &HostPlanner::clear_error)
        .def(
            "bind",
            [](HostPlanner& p, std::uintptr_t counts_address, std::uintptr_t out_address) {
                nb::gil_scoped_release release;
                p.bind(reinterpret_cast<const u64*>(counts_address),
                       reinterpret_cast<u8*>(out_address));
            },
            "counts_address"_a, "out_address"_a)
        .def("run", [](HostPlanner& p) {
            nb::gil_scoped_release release;
            HostPlanner::run(&p);
        });
}

}  // namespace fastkern
