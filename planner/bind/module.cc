// Python's view of the planner core. The readable interface is planner/api.py; nothing is decided
// here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <stdexcept>

#include "planner/core/balance.h"
#include "planner/core/plan.h"
#include "planner/core/validate.h"

namespace nb = nanobind;
using namespace fastkern;

namespace {

using Matrix = nb::ndarray<const i64, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<nb::numpy, u8, nb::ndim<1>>;

Bytes to_array(Vector<u8>&& block) {
    auto* owned = new Vector<u8>(std::move(block));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Vector<u8>*>(p); });
    return Bytes(owned->data(), {owned->size()}, owner);
}

const Header& checked_header(const nb::ndarray<const u8, nb::ndim<1>, nb::c_contig>& block) {
    if (block.size() < sizeof(Header))
        throw std::invalid_argument("a stage table is at least a header long");
    return *reinterpret_cast<const Header*>(block.data());
}

nb::dict schema() {
    nb::dict result;
    const auto add = [&result](const char* name, auto fill) {
        nb::list fields;
        fill([&fields](const char* field, std::size_t size) {
            fields.append(nb::make_tuple(field, size == 8 ? "u8" : "u4"));
        });
        result[name] = fields;
    };
#define FASTKERN_SCHEMA_FIELD(type, name) emit(#name, sizeof(type));
#define FASTKERN_SCHEMA(Name, FIELDS) add(#Name, [](auto emit) { FIELDS(FASTKERN_SCHEMA_FIELD) })
    FASTKERN_SCHEMA(Header, FASTKERN_HEADER_FIELDS);
    FASTKERN_SCHEMA(Queue, FASTKERN_QUEUE_FIELDS);
    FASTKERN_SCHEMA(Post, FASTKERN_POST_FIELDS);
    FASTKERN_SCHEMA(Stage, FASTKERN_STAGE_FIELDS);
    FASTKERN_SCHEMA(Stream, FASTKERN_STREAM_FIELDS);
    FASTKERN_SCHEMA(Segment, FASTKERN_SEGMENT_FIELDS);
    FASTKERN_SCHEMA(Link, FASTKERN_LINK_FIELDS);
    return result;
}

nb::dict constants() {
    nb::dict c;
    c["MAGIC"] = kTableMagic;
    c["VERSION"] = kTableVersion;
    c["NO_SLOT"] = kNoSlot;
    c["VALUE_BITS"] = kValueBits;
    nb::list queues, phases, at_end, policies;
    for (const char* name : {"pack", "push", "put", "receive", "land", "take", "sum", "reduce"})
        queues.append(name);
    const Stage stage{0, 1, 0, 1, 0, 0, 0};  // one chunk that takes one tick
    for (u32 q = 0; q < kNumQueues; ++q) {
        phases.append(plan_time(q, stage, 0) % 4);
        at_end.append(plan_time(q, stage, 0) / 4);
    }
    for (u32 p = 0; p < kNumPolicies; ++p) policies.append(policy_name(p));
    c["QUEUES"] = queues;
    c["PHASES"] = phases;
    c["AT_CHUNK_END"] = at_end;
    c["POLICIES"] = policies;
    nb::list ops;
    for (const char* name : {"all_to_all", "dispatch", "combine"}) ops.append(name);
    c["OPS"] = ops;
    c["ARRIVAL_BYTES"] = sizeof(Arrival);
    // FlagLayout::land(0, 0) is linear in the ranks and in the ranks' chunk flags.
    const u32 land = FlagLayout{1, 1, 1, 0}.land(0, 0);
    c["LAND_PER_RANK"] = land;
    c["LAND_PER_CHUNK"] = FlagLayout{1, 1, 1, 1}.land(0, 0) - land;
    return c;
}

Topology make_topology(u32 servers, u32 gpus_per_server, double scale_up_gbps,
                       double scale_out_gbps, double alpha_us, bool mesh, bool cross_rail) {
    Topology t;
    t.servers = servers;
    t.gpus_per_server = gpus_per_server;
    // 1 GB/s = 1e9 bytes/s: 1024 bytes take 1024000 / GBps picoseconds.
    t.scale_up_cost = static_cast<u64>(std::llround(1024000.0 / scale_up_gbps));
    t.scale_out_cost = static_cast<u64>(std::llround(1024000.0 / scale_out_gbps));
    t.alpha_ps = static_cast<u64>(std::llround(alpha_us * 1e6));
    t.mesh = mesh;
    t.cross_rail = cross_rail;
    return t;
}

}  // namespace

NB_MODULE(_core, m) {
    m.def("schema", &schema);
    m.def("constants", &constants);
    m.def("data_layout", [](nb::ndarray<const u8, nb::ndim<1>, nb::c_contig> block) {
        const DataLayout d = data_layout(checked_header(block));
        nb::dict result;
        result["send"] = d.send;
        result["receive"] = d.receive;
        result["window"] = d.window;
        result["scratch"] = d.scratch;
        result["bytes"] = d.bytes;
        return result;
    });
    m.def("flag_slots", [](u32 servers, u32 gpus_per_server, u32 chunk_slots) {
        return FlagLayout{servers * gpus_per_server, servers, gpus_per_server, chunk_slots}
            .num_slots();
    });

    nb::class_<Topology>(m, "Topology")
        .def("__init__",
             [](Topology* t, u32 servers, u32 gpus, double up, double out, double alpha, bool mesh,
                bool cross_rail) {
                 new (t) Topology(make_topology(servers, gpus, up, out, alpha, mesh, cross_rail));
             })
        .def_ro("scale_up_cost", &Topology::scale_up_cost)
        .def_ro("scale_out_cost", &Topology::scale_out_cost)
        .def_ro("alpha_ps", &Topology::alpha_ps);

    nb::class_<Plan>(m, "Plan")
        .def("table_bytes",
             [](const Plan& p, u32 rank) {
                 if (rank >= p.traffic.num_ranks)
                     throw std::out_of_range("rank is not in the plan");
                 return to_array(lower(p, rank));
             })
        .def(
            "combine_table_bytes",
            [](const Plan& p, u32 rank, u64 row_bytes, u64 partial_row_bytes, u64 num_partials,
               u64 num_tokens) {
                if (!p.moe()) throw std::invalid_argument("not the plan of a dispatch");
                if (rank >= p.traffic.num_ranks) throw std::out_of_range("rank is not in the plan");
                if (!row_bytes || !partial_row_bytes)
                    throw std::invalid_argument("rows have at least one byte");
                return to_array(lower_combine(
                    p, rank, CombineShape{row_bytes, partial_row_bytes, num_partials, num_tokens}));
            })
        .def("staging_rows_of",
             [](const Plan& p, u32 rank) {  // rows sent, rows received over scale-out
                 u64 out = 0, in = 0;
                 const u32 m = p.traffic.gpus_per_server, s = rank / m;
                 for (u32 b = 0; b < p.traffic.servers; ++b) {
                     if (b == s) continue;
                     out += p.traffic.rail_rows(s, b, rank % m);
                     in += p.traffic.rail_rows(b, s, rank % m);
                 }
                 return nb::make_tuple(out, in);
             })
        .def("packed_rows_of",
             [](const Plan& p, u32 rank) {  // rows that go to another rank's staging first
                 u64 rows = 0;
                 const u32 m = p.traffic.gpus_per_server, s = rank / m;
                 TilePieces tile;
                 BalanceScratch scratch;
                 for (u32 b = 0; b < p.traffic.servers; ++b) {
                     if (b == s) continue;
                     balance_tile(p.traffic, s, b, &scratch, &tile);
                     for (const Piece& x : tile.pieces)
                         if (x.src_local == rank % m && x.rail != x.src_local) rows += x.num_rows;
                 }
                 return rows;
             })
        .def("puts", &Plan::puts)
        .def(
            "validate", [](const Plan& p) { return validate(p); },
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "validate_combine",
            [](const Plan& p, u64 row_bytes, u64 partial_row_bytes, u64 num_partials,
               const std::vector<u64>& num_tokens) {
                return validate_combine(
                    p, CombineShape{row_bytes, partial_row_bytes, num_partials, 0}, num_tokens);
            },
            nb::call_guard<nb::gil_scoped_release>())
        .def("validate_tables",
             [](const Plan& p, const std::vector<nb::bytes>& tables) {
                 std::vector<Vector<u8>> blocks;
                 for (const nb::bytes& t : tables) {
                     const u8* data = static_cast<const u8*>(static_cast<const void*>(t.c_str()));
                     blocks.emplace_back(data, data + t.size());
                 }
                 return validate_tables(p, blocks);
             })
        .def("order",
             [](const Plan& p) {
                 nb::list puts;
                 for (const Put& x : p.order)
                     puts.append(nb::make_tuple(x.sender, x.receiver, x.row_end - x.row_begin,
                                                x.ticks_begin, x.ticks_end));
                 return puts;
             })
        .def("rail_rows",
             [](const Plan& p, u32 a, u32 b) {
                 std::vector<u64> rows;
                 for (u32 l = 0; l < p.traffic.gpus_per_server; ++l)
                     rows.push_back(p.traffic.rail_rows(a, b, l));
                 return rows;
             })
        .def("balance",
             [](const Plan& p, u32 a, u32 b) {
                 TilePieces tile;
                 BalanceScratch scratch;
                 balance_tile(p.traffic, a, b, &scratch, &tile);
                 nb::list pieces;
                 for (const Piece& x : tile.pieces)
                     pieces.append(nb::make_tuple(x.rail, x.src_local, x.dst_local, x.num_rows));
                 return pieces;
             })
        .def_prop_ro("scale_up_rows",
                     [](const Plan& p) {
                         const ScaleUpLoad load = p.scale_up_load();
                         return nb::make_tuple(load.most_out, load.most_in, load.most_link);
                     })
        .def_prop_ro("policy", [](const Plan& p) { return policy_name(p.policy); })
        .def_prop_ro("bound_rows", &Plan::bound_rows)
        .def_prop_ro("completion_rows", &Plan::completion_rows)
        .def_prop_ro("max_puts_per_rank", &Plan::max_puts_per_rank)
        .def_ro("row_bytes", &Plan::row_bytes)
        .def_ro("hash", &Plan::hash)
        .def_ro("why", &Plan::why)
        .def_prop_ro("num_ranks", [](const Plan& p) { return p.traffic.num_ranks; });

    m.def("plan_moe", [](Matrix to_server, Matrix to_rank, const Topology& topology, u64 row_bytes,
                         u32 policy, u64 chunk_bytes, u32 chunk_slots, u32 credit_lead) {
        const u32 r = topology.num_ranks();
        if (to_server.shape(0) != r || to_server.shape(1) != topology.servers ||
            to_rank.shape(0) != r || to_rank.shape(1) != r)
            throw std::invalid_argument("to_server must be [R, N] and to_rank [R, R]");
        return make_moe_plan(to_server.data(), to_rank.data(), topology, row_bytes,
                             static_cast<PolicyChoice>(policy),
                             Options{chunk_bytes, chunk_slots, credit_lead});
    });

    m.def("plan", [](Matrix traffic, const Topology& topology, u64 row_bytes, u32 policy,
                     u64 chunk_bytes, u32 chunk_slots, u32 credit_lead) {
        const u32 r = topology.num_ranks();
        if (traffic.shape(0) != r || traffic.shape(1) != r)
            throw std::invalid_argument("traffic must have shape [" + std::to_string(r) + ", " +
                                        std::to_string(r) + "]");
        return make_plan(traffic.data(), topology, row_bytes, static_cast<PolicyChoice>(policy),
                         Options{chunk_bytes, chunk_slots, credit_lead});
    });
}
