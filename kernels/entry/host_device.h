// Device kernels by name, run on the host target: what a device's module is to its driver, for the
// driver that works on the CPU.
#pragma once

#include <string>
#include <vector>

#include "planner/stage_table.h"

namespace fastkern {

std::vector<std::string> device_kernel_names();

// Lanes of a team where `teams` is set.
u32 lanes_of_team();

// Runs grid blocks of num_lanes lanes of kernel `name` ("fastkern_exchange", ...) and returns when
// it is over; `teams`: with teams of several lanes, see target/host_team.h. Where ranks' arguments
// name a network, it is that of transport/shared.h. arguments: the kernel's one parameter, a record
// of num_bytes. Throws std::invalid_argument for an unknown name or a record of another size.
void launch_device_kernel(const std::string& name, u32 grid, u32 num_lanes, bool teams,
                          const u8* arguments, u64 num_bytes);

}  // namespace fastkern
