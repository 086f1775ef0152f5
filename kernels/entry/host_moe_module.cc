#include "kernels/entry/host_moe_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "kernels/body/args.h"
#include "kernels/body/number.h"
#include "kernels/entry/host_route.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastkern {

namespace {

using ConstBytes = nb::ndarray<const u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Address = std::uintptr_t;

nb::list handle_schema() {
    nb::list fields;
#define FASTKERN_HANDLE_FIELD(type, name) \
    fields.append(nb::make_tuple(#name, sizeof(type) == 8 ? "u8" : "u4"));
    FASTKERN_HANDLE_FIELDS(FASTKERN_HANDLE_FIELD)
#undef FASTKERN_HANDLE_FIELD
    return fields;
}

nb::dict layout_dict(const ConstBytes& header) {
    if (header.size() < sizeof(HandleHeader))
        throw std::invalid_argument("a handle is at least a header long");
    HandleHeader h;
    std::memcpy(&h, header.data(), sizeof h);
    const HandleLayout a = handle_layout(h);
    nb::dict d;
    d["to_server"] = a.to_server;
    d["to_rank"] = a.to_rank;
    d["tokens_per_expert"] = a.tokens_per_expert;
    d["pack_list"] = a.pack_list;
    d["entries"] = a.entries;
    d["token_map"] = a.token_map;
    d["window_slots"] = a.window_slots;
    d["touched"] = a.touched;
    d["arrivals"] = a.arrivals;
    d["bytes"] = a.bytes;
    return d;
}

std::vector<u64> to_vector(const nb::ndarray<const u64, nb::ndim<1>, nb::c_contig>& array) {
    return {array.data(), array.data() + array.size()};
}

}  // namespace

void bind_moe(nb::module_& m) {
    m.def("handle_schema", &handle_schema);
    m.def("handle_layout", &layout_dict, "header"_a);
    nb::dict constants;
    constants["HANDLE_MAGIC"] = kHandleMagic;
    constants["NONE"] = kNone;
    constants["MOST_CHOICES"] = kMostChoices;
    constants["MOST_PARTS"] = kMostParts;
    constants["ENTRY_BYTES"] = sizeof(RowEntry);
    m.attr("moe_constants") = constants;

    nb::class_<MoeArgs>(m, "MoeArgs")
        .def("__init__", [](MoeArgs* self) { new (self) MoeArgs{}; })
        .def(
            "add_part",
            [](MoeArgs& a, Address input, Address output, u64 row_bytes, u64 offset) {
                if (a.num_parts == kMostParts)
                    throw std::invalid_argument("too many payload tensors");
                a.parts[a.num_parts++] = {reinterpret_cast<const u8*>(input),
                                          reinterpret_cast<u8*>(output), row_bytes, offset};
            },
            "input"_a, "output"_a, "row_bytes"_a, "offset"_a)
        .def(
            "set_dispatch",
            [](MoeArgs& a, Address handle, u64 header_offset, bool record, Address weights_input,
               Address weights_output, u64 weights_offset, u32 weight_bytes, Address index_output) {
                a.handle = reinterpret_cast<u8*>(handle);
                a.header_offset = header_offset;
                a.record = record;
                a.weights_input = reinterpret_cast<const u8*>(weights_input);
                a.weights_output = reinterpret_cast<u8*>(weights_output);
                a.weights_offset = weights_offset;
                a.weight_bytes = weight_bytes;
                a.index_output = reinterpret_cast<u64*>(index_output);
            },
            "handle"_a, "header_offset"_a, "record"_a, "weights_input"_a, "weights_output"_a,
            "weights_offset"_a, "weight_bytes"_a, "index_output"_a)
        .def(
            "set_combine",
            [](MoeArgs& a, Address handle, Address expert_out, Address row_weights, Address bias,
               Address result, u64 width, u64 bias_stride, u32 value_kind, u32 wire_kind,
               u32 bias_kind) {
                if (value_kind >= kNumValueKinds || wire_kind >= kNumValueKinds ||
                    bias_kind >= kNumValueKinds)
                    throw std::invalid_argument("not a kind of value");
                a.handle = reinterpret_cast<u8*>(handle);
                a.expert_out = reinterpret_cast<const u8*>(expert_out);
                a.row_weights = reinterpret_cast<const u8*>(row_weights);
                a.bias = reinterpret_cast<const u8*>(bias);
                a.result = reinterpret_cast<u8*>(result);
                a.width = width;
                a.bias_stride = bias_stride;
                a.value_kind = value_kind;
                a.wire_kind = wire_kind;
                a.bias_kind = bias_kind;
            },
            "handle"_a, "expert_out"_a, "row_weights"_a, "bias"_a, "result"_a, "width"_a,
            "bias_stride"_a, "value_kind"_a, "wire_kind"_a, "bias_kind"_a);

    nb::class_<HostRoute>(m, "HostRoute")
        .def(
            "__init__",
            [](HostRoute* self, Address topk_idx, u32 idx_bytes, u64 num_tokens, u32 topk,
               const std::vector<u32>& owner, const std::vector<u32>& local_index, u32 servers,
               u32 gpus_per_server, u32 rank, u32 num_units) {
                nb::gil_scoped_release release;
                new (self) HostRoute(RouteInput{reinterpret_cast<const u8*>(topk_idx), idx_bytes,
                                                num_tokens, topk, owner, local_index, servers,
                                                gpus_per_server, rank, num_units});
            },
            "topk_idx"_a, "idx_bytes"_a, "num_tokens"_a, "topk"_a, "owner"_a, "local_index"_a,
            "servers"_a, "gpus_per_server"_a, "rank"_a, "num_units"_a = 1)
        .def_prop_ro(
            "totals",
            [](const HostRoute& route) {
                auto* copy = new std::vector<u64>(route.totals());
                nb::capsule owner(
                    copy, [](void* p) noexcept { delete static_cast<std::vector<u64>*>(p); });
                return nb::ndarray<nb::numpy, u64, nb::ndim<1>>(copy->data(), {copy->size()},
                                                                owner);
            },
            nb::rv_policy::automatic)
        .def_prop_ro("bad", &HostRoute::bad)
        .def(
            "fill",
            [](HostRoute& route, Address handle,
               nb::ndarray<const u64, nb::ndim<1>, nb::c_contig> slot,
               nb::ndarray<const u64, nb::ndim<1>, nb::c_contig> window,
               nb::ndarray<const u64, nb::ndim<1>, nb::c_contig> list,
               nb::ndarray<const u64, nb::ndim<1>, nb::c_contig> returned,
               nb::ndarray<const u64, nb::ndim<1>, nb::c_contig> partial, u32 layout) {
                const RouteBases bases{to_vector(slot), to_vector(window), to_vector(list),
                                       to_vector(returned), to_vector(partial)};
                nb::gil_scoped_release release;
                route.fill(reinterpret_cast<u8*>(handle), bases, layout);
            },
            "handle"_a, "slot"_a, "window"_a, "list"_a, "returned"_a, "partial"_a, "layout"_a);
}

}  // namespace fastkern
