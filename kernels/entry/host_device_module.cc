#include "kernels/entry/host_device_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <type_traits>

#include "kernels/target/host.h"
//
#include "kernels/body/route.h"
#include "kernels/body/static.h"
#include "kernels/entry/host_device.h"
#include "kernels/entry/host_heap.h"
#include "kernels/transport/network_args.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastkern {

namespace {

using ArgumentBytes = nb::ndarray<const u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A field's type as a NumPy format, or as the name of another record; arrays with their length.
template <class T>
std::string format_of() {
    if constexpr (std::is_array_v<T>)
        return "(" + std::to_string(std::extent_v<T>) + ",)" + format_of<std::remove_extent_t<T>>();
    else if constexpr (std::is_same_v<T, ErrorRecord>)
        return "ErrorRecord";
    else if constexpr (std::is_same_v<T, PayloadPart>)
        return "PayloadPart";
    else if constexpr (std::is_same_v<T, MoeArgs>)
        return "MoeArgs";
    else if constexpr (std::is_same_v<T, RouteArgs>)
        return "RouteArgs";
    else if constexpr (std::is_same_v<T, StaticValues>)
        return "StaticValues";
    else if constexpr (std::is_same_v<T, u32>)
        return "u4";
    else {
        static_assert(std::is_pointer_v<T> || std::is_same_v<T, u64>, "a word or an address");
        return "u8";
    }
}

nb::dict record_schemas() {
    nb::dict schemas;
#define FASTKERN_SCHEMA_FIELD(type, name) \
    fields.append(nb::make_tuple(#name, format_of<type>(), offsetof(Record, name)));
#define FASTKERN_SCHEMA(Name, FIELDS)                            \
    {                                                            \
        using Record = Name;                                     \
        nb::list fields;                                         \
        FIELDS(FASTKERN_SCHEMA_FIELD)                            \
        schemas[#Name] = nb::make_tuple(fields, sizeof(Record)); \
    }
    FASTKERN_SCHEMA(ErrorRecord, FASTKERN_ERROR_FIELDS)
    FASTKERN_SCHEMA(Control, FASTKERN_CONTROL_FIELDS)
    FASTKERN_SCHEMA(TraceEvent, FASTKERN_TRACE_FIELDS)
    FASTKERN_SCHEMA(PayloadPart, FASTKERN_PART_FIELDS)
    FASTKERN_SCHEMA(MoeArgs, FASTKERN_MOE_ARGS_FIELDS)
    FASTKERN_SCHEMA(KernelArgs, FASTKERN_KERNEL_ARGS_FIELDS)
    FASTKERN_SCHEMA(LaunchArgs, FASTKERN_LAUNCH_ARGS_FIELDS)
    FASTKERN_SCHEMA(RouteArgs, FASTKERN_ROUTE_ARGS_FIELDS)
    FASTKERN_SCHEMA(StaticValues, FASTKERN_STATIC_VALUES_FIELDS)
    FASTKERN_SCHEMA(StaticArgs, FASTKERN_STATIC_ARGS_FIELDS)
    FASTKERN_SCHEMA(StaticLaunch, FASTKERN_STATIC_LAUNCH_FIELDS)
    FASTKERN_SCHEMA(NetworkArgs, FASTKERN_NETWORK_FIELDS)
    FASTKERN_SCHEMA(Arrival, FASTKERN_ARRIVAL_FIELDS)
    FASTKERN_SCHEMA(RowEntry, FASTKERN_ROW_ENTRY_FIELDS)
#undef FASTKERN_SCHEMA
#undef FASTKERN_SCHEMA_FIELD
    return schemas;
}

}  // namespace

void bind_device(nb::module_& m) {
    m.def("record_schemas", &record_schemas);
    m.def("device_kernel_names", &device_kernel_names);
    m.def(
        "control_layout",
        [](u32 num_ranks, u32 num_slots, u64 record_bytes) {
            const ControlLayout layout{num_ranks, num_slots, record_bytes};
            nb::dict d;
            d["flags"] = layout.flags();
            d["visible"] = layout.visible();
            d["records"] = layout.records();
            d["bytes"] = layout.bytes();
            return d;
        },
        "num_ranks"_a, "num_slots"_a, "record_bytes"_a);
    m.def(
        "launch_device_kernel",
        [](const std::string& name, u32 grid, u32 num_lanes, ArgumentBytes arguments, bool teams) {
            const u8* bytes = arguments.data();
            const u64 num_bytes = arguments.size();
            nb::gil_scoped_release release;
            launch_device_kernel(name, grid, num_lanes, teams, bytes, num_bytes);
        },
        "name"_a, "grid"_a, "num_lanes"_a, "arguments"_a, "teams"_a = false);
    m.def("lanes_of_team", &lanes_of_team);
}

}  // namespace fastkern
