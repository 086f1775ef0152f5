// What stands in for libcuda.so.1 and libamdhip64.so behind the real Python bindings, and shows
// that the drivers' arguments arrive as the C interfaces want them. Memory is the process's, work
// is done at once or, while a stream is captured, kept for the graph. What is not right is refused
// with "invalid value", after a line in stub_complaint().
//
// A module's image is text: "name=record_bytes;...".
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

using u32 = unsigned;
using u64 = unsigned long long;
using Status = int;
using Work = std::vector<std::function<void()>>;

constexpr Status kSuccess = 0, kInvalidValue = 1, kNotFound = 500, kNotReady = 600;
constexpr u64 kContext = 0xC0;

struct Kernel {
    std::string name;
    u64 record_bytes;
    bool loaded;
};
struct Event {
    bool timing;
    bool waited;
};

std::map<u64, u64> memory;  // address -> bytes
std::set<u64> opened;
std::map<u64, Work*> streams;  // -> what is captured, or null
std::map<u64, Event> events;
std::map<u64, std::string> modules;
std::map<u64, Kernel> kernels;
std::map<u64, Work> graphs;
std::vector<u64> contexts;
std::string complaint, launches;
u64 next_handle = 0x9000, clock_us = 0;

Status refuse(const std::string& what) {
    complaint += what + "\n";
    return kInvalidValue;
}
#define WANT(condition) \
    if (!(condition)) return refuse(std::string(__func__) + ": " #condition)

u64 word(const void* p) { return reinterpret_cast<u64>(p); }
template <class T>
T* pointer(u64 address) {
    return reinterpret_cast<T*>(address);
}

Status enqueue(u64 stream, std::function<void()> work) {
    WANT(streams.count(stream));
    clock_us += 250;
    if (streams[stream])
        streams[stream]->push_back(work);
    else
        work();
    return kSuccess;
}

Status allocate(u64* out, u64 bytes) {
    WANT(bytes > 0);
    void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    memory[word(p)] = bytes;
    *out = word(p);
    return kSuccess;
}
Status release(u64 address) {
    WANT(memory.count(address));
    memory.erase(address);
    std::free(pointer<void>(address));
    return kSuccess;
}
bool inside(u64 address, u64 bytes) {
    auto found = memory.upper_bound(address);
    if (found == memory.begin()) return false;
    --found;
    return address + bytes <= found->first + found->second;
}
Status copy(u64 to, u64 from, u64 bytes, u64 stream) {
    WANT(inside(to, bytes) && inside(from, bytes));
    return enqueue(stream, [=] { std::memcpy(pointer<void>(to), pointer<void>(from), bytes); });
}
Status fill(u64 to, unsigned char value, u64 bytes, u64 stream) {
    WANT(inside(to, bytes));
    return enqueue(stream, [=] { std::memset(pointer<void>(to), value, bytes); });
}

struct IpcHandle {
    char bytes[64];
};
Status export_memory(IpcHandle* handle, u64 address) {
    WANT(memory.count(address));
    std::memset(handle, 0xAB, sizeof *handle);
    std::memcpy(handle->bytes + 40, &address, 8);
    return kSuccess;
}
Status open_memory(u64* out, const IpcHandle& handle, u32 flags) {
    WANT(flags == 1);
    for (int k = 0; k < 64; ++k) WANT((k >= 40 && k < 48) || handle.bytes[k] == '\xAB');
    std::memcpy(out, handle.bytes + 40, 8);
    WANT(memory.count(*out));
    opened.insert(*out);
    return kSuccess;
}
Status close_memory(u64 address) {
    WANT(opened.erase(address));
    return kSuccess;
}

Status make_stream(u64* out, u32 flags) {
    WANT(flags == 1);
    streams[*out = next_handle++] = nullptr;
    return kSuccess;
}
Status destroy_stream(u64 stream) {
    WANT(stream && streams.count(stream) && !streams[stream]);
    streams.erase(stream);
    return kSuccess;
}
Status synchronize(u64 stream) {
    WANT(streams.count(stream) && !streams[stream]);
    return kSuccess;
}
Status make_event(u64* out, u32 flags) {
    WANT(flags == 0 || flags == 2);
    events[*out = next_handle++] = {flags == 0, false};
    return kSuccess;
}
Status destroy_event(u64 event) {
    WANT(events.erase(event));
    return kSuccess;
}
Status record(u64 event, u64 stream) {
    WANT(events.count(event) && streams.count(stream));
    return kSuccess;
}
Status wait_event(u64 stream, u64 event, u32 flags) {
    WANT(events.count(event) && streams.count(stream) && flags == 0);
    return kSuccess;
}
Status query(u64 event) {
    WANT(events.count(event));
    return events[event].waited ? kSuccess : kNotReady;
}
Status wait_for(u64 event) {
    WANT(events.count(event));
    events[event].waited = true;
    return kSuccess;
}
Status elapsed(float* ms, u64 begin, u64 end) {
    WANT(events.count(begin) && events.count(end));
    WANT(events[begin].timing && events[end].timing);
    *ms = 1.5f;
    return kSuccess;
}

Status load_module(u64* out, const void* image) {
    modules[*out = next_handle++] = static_cast<const char*>(image);
    return kSuccess;
}
Status unload_module(u64 module) {
    WANT(modules.erase(module));
    return kSuccess;
}
Status find_kernel(u64* out, u64 module, const char* name) {
    WANT(modules.count(module));
    const std::string key = std::string(name) + "=";
    const auto at = modules[module].find(key);
    if (at == std::string::npos) return kNotFound;
    const u64 bytes = std::strtoull(modules[module].c_str() + at + key.size(), nullptr, 10);
    kernels[*out = next_handle++] = {name, bytes, false};
    return kSuccess;
}
Status load_kernel(u64 kernel) {
    WANT(kernels.count(kernel));
    kernels[kernel].loaded = true;
    return kSuccess;
}
Status launch(u64 kernel, u32 gx, u32 gy, u32 gz, u32 x, u32 y, u32 z, u32 shared, u64 stream,
              void** parameters, void** extra) {
    WANT(kernels.count(kernel) && kernels[kernel].loaded);
    WANT(gx && gy == 1 && gz == 1 && x && y == 1 && z == 1 && shared == 0);
    WANT(parameters && parameters[0] && !extra);
    const Kernel& k = kernels[kernel];
    std::string line = k.name + " " + std::to_string(gx) + " " + std::to_string(x) + " ";
    for (u64 b = 0; b < k.record_bytes; ++b) {
        const unsigned char c = static_cast<unsigned char*>(parameters[0])[b];
        line += "0123456789abcdef"[c >> 4];
        line += "0123456789abcdef"[c & 15];
    }
    return enqueue(stream, [line] { launches += line + "\n"; });
}
Status occupancy(int* out, u64 kernel, int lanes, std::size_t shared) {
    WANT(kernels.count(kernel) && lanes == 4 && shared == 0);
    *out = 2;
    return kSuccess;
}

Status begin_capture(u64 stream, int mode) {
    WANT(stream && streams.count(stream) && !streams[stream] && mode == 1);
    streams[stream] = new Work;
    return kSuccess;
}
Status end_capture(u64 stream, u64* out) {
    WANT(streams.count(stream) && streams[stream]);
    graphs[*out = next_handle++] = *streams[stream];
    delete streams[stream];
    streams[stream] = nullptr;
    return kSuccess;
}
Status instantiate(u64* out, u64 graph, u64 flags) {
    WANT(graphs.count(graph) && flags == 0);
    const Work work = graphs[graph];
    graphs[*out = next_handle++] = work;
    return kSuccess;
}
Status destroy_graph(u64 graph) {
    WANT(graphs.erase(graph));
    return kSuccess;
}
Status replay(u64 graph, u64 stream) {
    WANT(graphs.count(graph));
    for (const auto& work : graphs[graph]) enqueue(stream, work);
    return kSuccess;
}
Status call_host(u64 stream, void (*function)(void*), void* data) {
    WANT(function);
    return enqueue(stream, [=] { function(data); });
}

}  // namespace

extern "C" {

const char* stub_complaint() { return complaint.c_str(); }
const char* stub_launches() { return launches.c_str(); }
u64 stub_leftovers() {
    return memory.size() + opened.size() + streams.size() - streams.count(0) + events.size() +
           modules.size() + graphs.size() + contexts.size();
}

}  // extern "C"
