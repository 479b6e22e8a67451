// A device of the tests' own, "emulated": its memory is the host's, and the host computes for it. But PyTorch knows it
// as an accelerator, so whatever mixes up tensors of host and device fails as it would on a GPU, and what crosses
// between them is counted. Built and loaded by __init__.py.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <ATen/ops/item.h>

#include <atomic>
#include <cstring>
#include <string>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;

std::atomic<std::int64_t> copies_to_host{0}, bytes_to_host{0}, copies_to_device{0}, bytes_to_device{0}, waits{0};

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(std::size_t size) override {
        void* const data = size == 0 ? nullptr : std::malloc(size);
        return {data, data, &std::free, c10::Device(kind, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory)

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kind; }
    c10::Device exchangeDevice(c10::Device) const override { return {kind, 0}; }
    c10::Device getDevice() const override { return {kind, 0}; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void synchronizeStream(const c10::Stream&) const override { ++waits; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
};
Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    const auto bytes = static_cast<std::int64_t>(from.numel() * static_cast<std::int64_t>(from.element_size()));
    if (from.is_cpu()) ++copies_to_device, bytes_to_device += bytes;
    if (to.is_cpu()) ++copies_to_host, bytes_to_host += bytes;
    on_host(to).copy_(on_host(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
    if (tensor.sizes() == size) return tensor;
    const auto larger = empty(size, tensor.scalar_type(), {}, {}, {}, {});
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(larger.storage());
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    return tensor;
}

c10::Scalar item(const at::Tensor& tensor) {
    ++waits;
    return on_host(tensor).item();
}

// Computes on the host. Tensors of the host must not be among the arguments: a GPU could not read them. PyTorch itself
// allows scalars, and indices.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::string name = op.schema().operator_name().name;
    const bool may_mix = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
    const auto check = [&](const at::Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0 || may_mix, name,
                    " got tensors of the host and of the emulated device");
    };
    for (const auto& argument : torch::jit::last(stack, op.schema().arguments().size())) {
        if (argument.isTensor()) check(argument.toTensor());
        if (argument.isTensorList())
            for (const at::Tensor& tensor : argument.toTensorVector()) check(tensor);
    }
    // What the fallback copies does not cross on a real device.
    const std::int64_t before[] = {copies_to_host, bytes_to_host, copies_to_device, bytes_to_device, waits};
    at::native::cpu_fallback(op, stack);
    copies_to_host = before[0], bytes_to_host = before[1];
    copies_to_device = before[2], bytes_to_device = before[3], waits = before[4];
    for (const char* waiting : {"nonzero", "masked_select", "_unique2", "equal", "bincount"})  // their sizes, or results
        if (name == std::string("aten::") + waiting) ++waits;
}

std::vector<std::int64_t> counts() {
    return {copies_to_host, bytes_to_host, copies_to_device, bytes_to_device, waits};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
    m.impl("view", TORCH_FN(at::cpu::view));
    m.impl("_reshape_alias", TORCH_FN(at::cpu::_reshape_alias));
    m.impl("set_.source_Storage_storage_offset",
           static_cast<at::Tensor& (*)(at::Tensor&, at::Storage, std::int64_t, c10::IntArrayRef, c10::IntArrayRef)>(
               at::cpu::set_));
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("resize_", &resize);
    m.impl("_local_scalar_dense", &item);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY(emulated, m) { m.def("counts", &counts); }
