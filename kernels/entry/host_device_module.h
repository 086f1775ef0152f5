// Python's view of what devices are launched with; see host_module.cc.
#pragma once

#include <nanobind/nanobind.h>

namespace fastkern {

void bind_device(nanobind::module_& m);

}  // namespace fastkern
