// Python's view of the host target. The readable interface is fastkern/communicator.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "kernels/entry/host_cluster.h"
#include "kernels/entry/host_device_module.h"
#include "kernels/entry/host_moe_module.h"
#include "kernels/entry/host_planner_module.h"
#include "kernels/entry/host_rank.h"

namespace nb = nanobind;
using namespace fastkern;
using namespace nb::literals;

namespace {

using ConstBytes = nb::ndarray<const u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

LaunchOptions make_options(u32 num_blocks, u32 num_lanes, const std::string& transport,
                           u64 scale_up_ps_per_kib, u64 scale_out_ps_per_kib, u64 seed) {
    if (num_blocks < 1 || num_blocks > 1024)
        throw std::invalid_argument("num_blocks must be 1 to 1024");
    if (num_lanes < 1 || num_lanes > 64) throw std::invalid_argument("num_lanes must be 1 to 64");
    LaunchOptions o;
    o.num_blocks = num_blocks;
    o.num_lanes = num_lanes;
    if (transport == "shm")
        o.transport = HostTransport::kShm;
    else if (transport == "shaped")
        o.transport = HostTransport::kShaped;
    else if (transport == "shuffled")
        o.transport = HostTransport::kShuffled;
    else
        throw std::invalid_argument("transport must be shm, shaped or shuffled, not " + transport);
    o.rates.ps_per_kib[kScaleUp] = scale_up_ps_per_kib;
    o.rates.ps_per_kib[kScaleOut] = scale_out_ps_per_kib;
    o.seed = seed;
    return o;
}

nb::dict error_dict(const ErrorRecord& e) {
    nb::dict d;
    d["expected"] = e.expected;
    d["seen"] = e.seen;
    d["waited_ns"] = e.waited_ns;
    d["epoch"] = e.epoch;
    d["queue"] = e.queue;
    d["stage"] = e.stage;
    d["chunk"] = e.chunk;
    d["peer"] = e.peer;
    d["slot"] = e.slot;
    d["written"] = e.state == kRecordWritten;
    return d;
}

const char* outcome_name(Outcome o) {
    return o == Outcome::kDone ? "done" : o == Outcome::kTimeout ? "timeout" : "aborted";
}

struct PyRank {
    HostRank rank;
    ControlLayout layout;
};

}  // namespace

NB_MODULE(_host, m) {
    bind_moe(m);
    bind_device(m);
    bind_planner(m);

    nb::class_<LaunchOptions>(m, "LaunchOptions")
        .def(
            "__init__",
            [](LaunchOptions* o, u32 num_blocks, u32 num_lanes, const std::string& transport,
               u64 up, u64 out, u64 seed) {
                new (o)
                    LaunchOptions(make_options(num_blocks, num_lanes, transport, up, out, seed));
            },
            "num_blocks"_a = 1, "num_lanes"_a = 1, "transport"_a = "shm",
            "scale_up_ps_per_kib"_a = 0, "scale_out_ps_per_kib"_a = 0, "seed"_a = 0)
        .def_ro("num_blocks", &LaunchOptions::num_blocks)
        .def_ro("num_lanes", &LaunchOptions::num_lanes);

    nb::class_<SharedMemory>(m, "SharedMemory")
        .def(nb::init<const std::string&, u64, bool>(), "name"_a, "num_bytes"_a, "create"_a)
        .def("unlink", &SharedMemory::unlink)
        .def_prop_ro("num_bytes", &SharedMemory::bytes)
        .def_prop_ro("address", [](const SharedMemory& s) {
            return reinterpret_cast<std::uintptr_t>(s.base());
        });

    m.def("control_bytes", [](u32 num_ranks, u32 num_slots, u64 record_bytes) {
        return ControlLayout{num_ranks, num_slots, record_bytes}.bytes();
    });

    nb::class_<PyRank>(m, "HostRank")
        .def(
            "__init__",
            [](PyRank* self, u32 rank, u32 num_ranks, u32 num_slots, u64 record_bytes,
               const SharedMemory& control) {
                const ControlLayout layout{num_ranks, num_slots, record_bytes};
                if (rank >= num_ranks) throw std::invalid_argument("rank is not below num_ranks");
                if (record_bytes % 8)
                    throw std::invalid_argument("record_bytes must be a multiple of 8");
                if (control.bytes() < layout.bytes() * num_ranks)
                    throw std::invalid_argument("the control segment is too small");
                new (self) PyRank{HostRank(rank, layout, control.base()), layout};
            },
            "rank"_a, "num_ranks"_a, "num_slots"_a, "record_bytes"_a, "control"_a,
            nb::keep_alive<1, 6>())
        .def("post_record",
             [](PyRank& self, u64 epoch, ConstBytes payload) {
                 if (payload.size() > self.layout.record_bytes)
                     throw std::invalid_argument("the record is too large");
                 self.rank.post_record(epoch, payload.data(), payload.size());
             })
        .def("await_records",
             [](PyRank& self, u64 epoch, u64 slice_ns) {
                 nb::gil_scoped_release release;
                 return outcome_name(self.rank.await_records(epoch, slice_ns));
             })
        .def("missing_records",
             [](PyRank& self, u64 epoch) { return self.rank.missing_records(epoch); })
        .def("read_records",
             [](PyRank& self, u64 epoch, MutableBytes out) {
                 const u64 bytes = out.size() / self.layout.num_ranks;  // of each, from its start
                 if (out.size() % self.layout.num_ranks || bytes > self.layout.record_bytes)
                     throw std::invalid_argument("the buffer has the wrong size");
                 for (u32 r = 0; r < self.layout.num_ranks; ++r)
                     std::memcpy(out.data() + r * bytes, self.rank.record(epoch, r), bytes);
             })
        .def("announce",
             [](PyRank& self, u64 generation, const std::string& name, u64 bytes_per_rank,
                u32 status) { self.rank.announce(generation, name, bytes_per_rank, status); })
        .def("await_mailbox",
             [](PyRank& self, u64 generation, u64 slice_ns) {
                 nb::gil_scoped_release release;
                 return outcome_name(self.rank.await_mailbox(generation, slice_ns));
             })
        .def("mailbox",
             [](PyRank& self) {
                 const Mailbox& box = self.rank.mailbox();
                 return nb::make_tuple(std::string(box.name), box.bytes_per_rank, box.status);
             })
        .def("acknowledge", [](PyRank& self, u64 generation) { self.rank.acknowledge(generation); })
        .def("await_acks",
             [](PyRank& self, u64 generation, u64 slice_ns) {
                 nb::gil_scoped_release release;
                 return outcome_name(self.rank.await_acks(generation, slice_ns));
             })
        .def("missing_acks",
             [](PyRank& self, u64 generation) { return self.rank.missing_acks(generation); })
        .def("map_data",
             [](PyRank& self, const SharedMemory& data, u64 bytes_per_rank) {
                 if (data.bytes() < bytes_per_rank * self.layout.num_ranks)
                     throw std::invalid_argument("the data segment is too small");
                 self.rank.map_data(data.base(), bytes_per_rank);
             })
        .def("launch",
             [](PyRank& self, ConstBytes table, std::uintptr_t input, std::uintptr_t output,
                u64 epoch, u64 progress_ns, const LaunchOptions& options) {
                 const u8* block = table.data();
                 nb::gil_scoped_release release;
                 return self.rank.launch(block, reinterpret_cast<const u8*>(input),
                                         reinterpret_cast<u8*>(output), nullptr, epoch, progress_ns,
                                         options);
             })
        .def("launch_moe",
             [](PyRank& self, ConstBytes table, const MoeArgs& moe, u64 epoch, u64 progress_ns,
                const LaunchOptions& options) {
                 const u8* block = table.data();
                 nb::gil_scoped_release release;
                 return self.rank.launch(block, nullptr, nullptr, &moe, epoch, progress_ns,
                                         options);
             })
        .def("start_trace", [](PyRank& self, u64 capacity) { self.rank.start_trace(capacity); })
        .def("stop_trace",
             [](PyRank& self) {  // TraceEvent records
                 const std::vector<TraceEvent> events = self.rank.stop_trace();
                 return nb::bytes(reinterpret_cast<const char*>(events.data()),
                                  events.size() * sizeof(TraceEvent));
             })
        .def("trace_count", [](PyRank& self) { return self.rank.trace_count(); })
        .def("abort_word", [](PyRank& self) { return self.rank.abort_word(); })
        .def("abort_all", [](PyRank& self, u64 epoch) { self.rank.abort_all(epoch); })
        .def("completed_epoch", [](PyRank& self) { return self.rank.completed_epoch(); })
        .def("error", [](PyRank& self, u32 origin) {
            if (origin >= self.layout.num_ranks)
                throw std::invalid_argument("origin is not a rank");
            return error_dict(self.rank.error(origin));
        });

    // Tests: all ranks as threads. calls: list of (tables, inputs, outputs, delay_us), arrays per
    // rank.
    m.def(
        "run_cluster",
        [](const std::vector<std::tuple<std::vector<ConstBytes>, std::vector<ConstBytes>,
                                        std::vector<MutableBytes>, std::vector<u32>>>& calls,
           const LaunchOptions& options, u64 progress_ns) {
            std::vector<ClusterCall> list;
            for (const auto& [tables, inputs, outputs, delay_us] : calls) {
                ClusterCall call;
                for (const auto& t : tables) call.tables.push_back(t.data());
                for (const auto& t : inputs) call.inputs.push_back(t.data());
                for (const auto& t : outputs) call.outputs.push_back(t.data());
                call.delay_us = delay_us;
                list.push_back(std::move(call));
            }
            nb::gil_scoped_release release;
            return run_cluster(list, options, progress_ns);
        },
        "calls"_a, "options"_a, "progress_ns"_a);
}
