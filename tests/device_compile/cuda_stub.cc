// Stands in for libcuda.so.1: see driver_stub.h.
#include "driver_stub.h"

extern "C" {

Status cuInit(u32 flags) {
    WANT(flags == 0);
    streams[0] = nullptr;
    return kSuccess;
}
Status cuDriverGetVersion(int* out) { return *out = 13000, kSuccess; }
Status cuDeviceGetCount(int* out) { return *out = 2, kSuccess; }
Status cuDeviceGet(int* out, int ordinal) { return *out = ordinal, kSuccess; }
Status cuDeviceGetName(char* out, int bytes, int device) {
    WANT(bytes == 256 && device == 1);
    std::strcpy(out, "a stub");
    return kSuccess;
}
Status cuDeviceTotalMem(std::size_t* out, int device) {
    WANT(device == 1);
    *out = 1ull << 37;
    return kSuccess;
}
Status cuDeviceGetAttribute(int* out, int which, int device) {
    WANT(device == 1);
    const std::map<int, int> known{{1, 1024}, {16, 132}, {75, 9}, {76, 0}};  // CUdevice_attribute
    WANT(known.count(which));
    *out = known.at(which);
    return kSuccess;
}
Status cuDevicePrimaryCtxRetain(u64* out, int device) {
    WANT(device == 1);
    *out = kContext;
    return kSuccess;
}
Status cuDevicePrimaryCtxRelease(int device) {
    WANT(device == 1);
    return kSuccess;
}
Status cuCtxGetCurrent(u64* out) { return *out = contexts.empty() ? 0 : contexts.back(), kSuccess; }
Status cuCtxPushCurrent(u64 context) {
    WANT(context == kContext);
    contexts.push_back(context);
    return kSuccess;
}
Status cuCtxPopCurrent(u64* out) {
    WANT(!contexts.empty());
    *out = contexts.back();
    contexts.pop_back();
    return kSuccess;
}
Status cuModuleGetLoadingMode(int* out) { return *out = 2, kSuccess; }
Status cuGetErrorString(int, const char** out) { return *out = "a text", kSuccess; }
#define IN_CONTEXT WANT(!contexts.empty() && contexts.back() == kContext)
Status cuMemAlloc(u64* out, std::size_t bytes) {
    IN_CONTEXT;
    return allocate(out, bytes);
}
Status cuMemFree(u64 address) { return release(address); }
Status cuMemHostAlloc(u64* out, std::size_t bytes, u32 flags) {
    IN_CONTEXT;
    WANT(flags == 1);  // portable
    return allocate(out, bytes);
}
Status cuMemFreeHost(u64 address) { return release(address); }
Status cuMemcpyAsync(u64 to, u64 from, std::size_t bytes, u64 stream) {
    IN_CONTEXT;
    return copy(to, from, bytes, stream);
}
Status cuMemsetD8Async(u64 to, unsigned char value, std::size_t bytes, u64 stream) {
    return fill(to, value, bytes, stream);
}
Status cuIpcGetMemHandle(IpcHandle* out, u64 address) { return export_memory(out, address); }
Status cuIpcOpenMemHandle(u64* out, IpcHandle handle, u32 flags) {
    return open_memory(out, handle, flags);
}
Status cuIpcCloseMemHandle(u64 address) { return close_memory(address); }
Status cuStreamCreate(u64* out, u32 flags) { return make_stream(out, flags); }
Status cuStreamDestroy(u64 stream) { return destroy_stream(stream); }
Status cuStreamSynchronize(u64 stream) { return synchronize(stream); }
Status cuEventCreate(u64* out, u32 flags) { return make_event(out, flags); }
Status cuEventDestroy(u64 event) { return destroy_event(event); }
Status cuEventRecord(u64 event, u64 stream) { return record(event, stream); }
Status cuStreamWaitEvent(u64 stream, u64 event, u32 flags) {
    return wait_event(stream, event, flags);
}
Status cuEventQuery(u64 event) { return query(event); }
Status cuEventSynchronize(u64 event) { return wait_for(event); }
Status cuEventElapsedTime(float* ms, u64 begin, u64 end) { return elapsed(ms, begin, end); }
Status cuModuleLoadData(u64* out, const void* image) { return load_module(out, image); }
Status cuModuleUnload(u64 module) { return unload_module(module); }
Status cuModuleGetFunction(u64* out, u64 module, const char* name) {
    return find_kernel(out, module, name);
}
Status cuFuncLoad(u64 kernel) { return load_kernel(kernel); }
Status cuLaunchKernel(u64 kernel, u32 gx, u32 gy, u32 gz, u32 x, u32 y, u32 z, u32 shared,
                      u64 stream, void** parameters, void** extra) {
    IN_CONTEXT;
    return launch(kernel, gx, gy, gz, x, y, z, shared, stream, parameters, extra);
}
Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, u64 kernel, int lanes,
                                                   std::size_t shared) {
    return occupancy(out, kernel, lanes, shared);
}
Status cuStreamBeginCapture(u64 stream, int mode) { return begin_capture(stream, mode); }
Status cuStreamEndCapture(u64 stream, u64* out) { return end_capture(stream, out); }
Status cuGraphInstantiateWithFlags(u64* out, u64 graph, u64 flags) {
    return instantiate(out, graph, flags);
}
Status cuGraphDestroy(u64 graph) { return destroy_graph(graph); }
Status cuGraphLaunch(u64 graph, u64 stream) { return replay(graph, stream); }
Status cuGraphExecDestroy(u64 graph) { return destroy_graph(graph); }
Status cuLaunchHostFunc(u64 stream, void (*function)(void*), void* data) {
    return call_host(stream, function, data);
}

// How the bindings find all of these.
Status cuGetProcAddress_v2(const char* name, void** out, int, u64, int* status) {
#define ENTRY(function)                               \
    {                                                 \
        #function, reinterpret_cast<void*>(&function) \
    }
    static const std::map<std::string, void*> table{
        ENTRY(cuInit),
        ENTRY(cuDriverGetVersion),
        ENTRY(cuDeviceGetCount),
        ENTRY(cuDeviceGet),
        ENTRY(cuDeviceGetName),
        ENTRY(cuDeviceTotalMem),
        ENTRY(cuDeviceGetAttribute),
        ENTRY(cuDevicePrimaryCtxRetain),
        ENTRY(cuDevicePrimaryCtxRelease),
        ENTRY(cuCtxGetCurrent),
        ENTRY(cuCtxPushCurrent),
        ENTRY(cuCtxPopCurrent),
        ENTRY(cuModuleGetLoadingMode),
        ENTRY(cuGetErrorString),
        ENTRY(cuMemAlloc),
        ENTRY(cuMemFree),
        ENTRY(cuMemHostAlloc),
        ENTRY(cuMemFreeHost),
        ENTRY(cuMemcpyAsync),
        ENTRY(cuMemsetD8Async),
        ENTRY(cuIpcGetMemHandle),
        ENTRY(cuIpcOpenMemHandle),
        ENTRY(cuIpcCloseMemHandle),
        ENTRY(cuStreamCreate),
        ENTRY(cuStreamDestroy),
        ENTRY(cuStreamSynchronize),
        ENTRY(cuEventCreate),
        ENTRY(cuEventDestroy),
        ENTRY(cuEventRecord),
        ENTRY(cuStreamWaitEvent),
        ENTRY(cuEventQuery),
        ENTRY(cuEventSynchronize),
        ENTRY(cuEventElapsedTime),
        ENTRY(cuModuleLoadData),
        ENTRY(cuModuleUnload),
        ENTRY(cuModuleGetFunction),
        ENTRY(cuFuncLoad),
        ENTRY(cuLaunchKernel),
        ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor),
        ENTRY(cuStreamBeginCapture),
        ENTRY(cuStreamEndCapture),
        ENTRY(cuGraphInstantiateWithFlags),
        ENTRY(cuGraphDestroy),
        ENTRY(cuGraphLaunch),
        ENTRY(cuGraphExecDestroy),
        ENTRY(cuLaunchHostFunc)};
#undef ENTRY
    if (std::string(name).find("cuGetProcAddress") == 0) {
        *out = reinterpret_cast<void*>(&cuGetProcAddress_v2);
        return kSuccess;
    }
    const auto found = table.find(name);
    *out = found == table.end() ? nullptr : found->second;
    if (status) *status = found == table.end() ? 1 : 0;
    return found == table.end() ? kNotFound : kSuccess;
}

}  // extern "C"
