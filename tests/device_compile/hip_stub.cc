// Stands in for libamdhip64.so: see driver_stub.h.
#include "driver_stub.h"

extern "C" {

static int current = 0;

Status hipInit(u32 flags) {
    WANT(flags == 0);
    streams[0] = nullptr;
    return kSuccess;
}
Status hipGetDeviceCount(int* out) { return *out = 2, kSuccess; }
Status hipGetDevice(int* out) { return *out = current, kSuccess; }
Status hipSetDevice(int device) { return current = device, kSuccess; }
Status hipMalloc(u64* out, std::size_t bytes) { return allocate(out, bytes); }
Status hipExtMallocWithFlags(u64* out, std::size_t bytes, u32 flags) {
    WANT(flags == 3);  // hipDeviceMallocUncached
    return allocate(out, bytes);
}
Status hipFree(u64 address) { return release(address); }
Status hipHostMalloc(u64* out, std::size_t bytes, u32 flags) {
    WANT(flags == 1);  // portable
    return allocate(out, bytes);
}
Status hipHostFree(u64 address) { return release(address); }
Status hipMemcpyAsync(u64 to, u64 from, std::size_t bytes, int kind, u64 stream) {
    WANT(kind == 4);  // hipMemcpyDefault
    return copy(to, from, bytes, stream);
}
Status hipMemsetD8Async(u64 to, unsigned char value, std::size_t bytes, u64 stream) {
    return fill(to, value, bytes, stream);
}
Status hipIpcGetMemHandle(IpcHandle* out, u64 address) { return export_memory(out, address); }
Status hipIpcOpenMemHandle(u64* out, IpcHandle handle, u32 flags) {
    return open_memory(out, handle, flags);
}
Status hipIpcCloseMemHandle(u64 address) { return close_memory(address); }
Status hipStreamCreateWithFlags(u64* out, u32 flags) { return make_stream(out, flags); }
Status hipStreamDestroy(u64 stream) { return destroy_stream(stream); }
Status hipStreamSynchronize(u64 stream) { return synchronize(stream); }
Status hipEventCreateWithFlags(u64* out, u32 flags) { return make_event(out, flags); }
Status hipEventDestroy(u64 event) { return destroy_event(event); }
Status hipEventRecord(u64 event, u64 stream) { return record(event, stream); }
Status hipStreamWaitEvent(u64 stream, u64 event, u32 flags) {
    return wait_event(stream, event, flags);
}
Status hipEventQuery(u64 event) { return query(event); }
Status hipEventSynchronize(u64 event) { return wait_for(event); }
Status hipEventElapsedTime(float* ms, u64 begin, u64 end) { return elapsed(ms, begin, end); }
Status hipModuleLoadData(u64* out, const void* image) { return load_module(out, image); }
Status hipModuleUnload(u64 module) { return unload_module(module); }
Status hipModuleGetFunction(u64* out, u64 module, const char* name) {
    const Status status = find_kernel(out, module, name);
    return status ? status : load_kernel(*out);
}
Status hipModuleLaunchKernel(u64 kernel, u32 gx, u32 gy, u32 gz, u32 x, u32 y, u32 z, u32 shared,
                             u64 stream, void** parameters, void** extra) {
    return launch(kernel, gx, gy, gz, x, y, z, shared, stream, parameters, extra);
}
Status hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* out, u64 kernel, int lanes,
                                                          std::size_t shared) {
    return occupancy(out, kernel, lanes, shared);
}
Status hipStreamBeginCapture(u64 stream, int mode) { return begin_capture(stream, mode); }
Status hipStreamEndCapture(u64 stream, u64* out) { return end_capture(stream, out); }
Status hipGraphInstantiateWithFlags(u64* out, u64 graph, u64 flags) {
    return instantiate(out, graph, flags);
}
Status hipGraphDestroy(u64 graph) { return destroy_graph(graph); }
Status hipGraphLaunch(u64 graph, u64 stream) { return replay(graph, stream); }
Status hipGraphExecDestroy(u64 graph) { return destroy_graph(graph); }
Status hipLaunchHostFunc(u64 stream, void (*function)(void*), void* data) {
    return call_host(stream, function, data);
}
// hipDeviceProp_t, as far as it is read.
struct Properties {
    char name[256];
    char unused1[32];
    u64 memory_bytes;
    char unused2[24];
    int most_lanes;
    char unused3[64];
    int num_processors;
    char unused4[768];
    char architecture[256];
    char unused5[56];
};
static_assert(sizeof(Properties) == 1472 && offsetof(Properties, most_lanes) == 320 &&
                  offsetof(Properties, num_processors) == 388 &&
                  offsetof(Properties, architecture) == 1160,
              "as in hip_runtime_api.h");
Status hipGetDevicePropertiesR0600(Properties* out, int device) {
    WANT(device == 1);
    std::memset(out, 0, sizeof *out);
    std::strcpy(out->name, "a stub");
    std::strcpy(out->architecture, "gfx942:sramecc+:xnack-");
    out->memory_bytes = 1ull << 37;
    out->most_lanes = 1024;
    out->num_processors = 304;
    return kSuccess;
}

}  // extern "C"
