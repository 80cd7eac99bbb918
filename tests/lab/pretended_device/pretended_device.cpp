// A CUDA device whose memory is the host's.
//
// Tensors say cuda:N. Every operation that has no kernel for CUDA runs the CPU's kernel on aliases
// of its tensors, so that results are the CPU's bit for bit. Three things are as on a GPU: tensors
// of different devices do not mix, the host learns of values only where it waits for the device,
// and copies without waiting have no effect before the host waits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

constexpr c10::DeviceIndex kDevices = 8;
constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;
constexpr int kPoison = 0xFF;  // makes floating-point numbers NaN, and integers -1 or 255
const c10::DispatchKeySet kCpuKernels(c10::DispatchKey::CPU);

thread_local c10::DeviceIndex current_index = 0;

c10::Device device_at(c10::DeviceIndex index) { return c10::Device(kCuda, index); }

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : device_at(current_index);
}

// ---------------------------------------------------------------------------------------------
// Waiting: what the host does when it learns of values

using WaitCallback = void (*)(const char* kind, const char* operation);
WaitCallback wait_callback = nullptr;

std::mutex memory_mutex;
std::map<const char*, size_t> pinned_blocks;  // by address

struct PendingRead {  // of the device, into pinned memory that is poisoned until the host waits
  at::Tensor target;
  at::Tensor value;
};
struct PendingUpload {  // from pinned memory that must not change before the host waits
  at::Tensor source;
  at::Tensor value;
};
std::vector<PendingRead> pending_reads;
std::vector<PendingUpload> pending_uploads;

at::Tensor snapshot(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::clone(tensor, at::MemoryFormat::Contiguous);
}

bool same_bytes(const at::Tensor& tensor, const at::Tensor& value) {
  const at::Tensor now = snapshot(tensor);
  return std::memcmp(now.const_data_ptr(), value.const_data_ptr(), now.nbytes()) == 0;
}

// Finish the copies that did not wait. Raises if the host changed a source meanwhile.
void finish_copies() {
  std::vector<PendingRead> reads;
  std::vector<PendingUpload> uploads;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    reads.swap(pending_reads);
    uploads.swap(pending_uploads);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& read : reads) {
    read.target.copy_(read.value);
  }
  for (const auto& upload : uploads) {
    TORCH_CHECK(
        same_bytes(upload.source, upload.value),
        "pretended device: pinned memory of shape ", upload.source.sizes(),
        " changed while a copy to the device could still be running. Wait for the device, or copy "
        "from memory that nothing writes");
  }
}

void wait_for_device(const char* kind, const std::string& operation) {
  if (wait_callback != nullptr) {
    wait_callback(kind, operation.c_str());
  }
  finish_copies();
}

// ---------------------------------------------------------------------------------------------
// Memory

std::atomic<int64_t> allocated_bytes{0};
std::atomic<int64_t> peak_bytes{0};

// Memory of the device, which counts while it lives.
struct DeviceBlock {
  DeviceBlock(c10::DataPtr block, size_t block_size)
      : memory(std::move(block)), size(static_cast<int64_t>(block_size)) {
    const int64_t now = allocated_bytes += size;
    int64_t peak = peak_bytes;
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
  }
  ~DeviceBlock() { allocated_bytes -= size; }
  c10::DataPtr memory;
  int64_t size;
};

void release_block(void* context) { delete static_cast<DeviceBlock*>(context); }

c10::DataPtr on_device(c10::DataPtr memory, size_t size, c10::Device device) {
  void* address = memory.get();
  return {address, new DeviceBlock(std::move(memory), size), &release_block, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return on_device(c10::GetCPUAllocator()->allocate(size), size, device_at(current_index));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};

struct PinnedBlock {
  c10::DataPtr memory;
};

void release_pinned(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned_blocks.erase(static_cast<const char*>(block->memory.get()));
  }
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new PinnedBlock{c10::GetCPUAllocator()->allocate(size)};
    void* address = block->memory.get();
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned_blocks[static_cast<const char*>(address)] = size;
    return {address, block, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address) {
  const auto* bytes = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto after = pinned_blocks.upper_bound(bytes);
  if (after == pinned_blocks.begin()) {
    return false;
  }
  auto block = std::prev(after);
  return bytes < block->first + block->second;
}

// ---------------------------------------------------------------------------------------------
// Random numbers: a CUDA generator that draws the CPU's numbers

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        cpu(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
  at::Generator cpu;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kDevices>;
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) {
      (*made)[i] = at::make_generator<Generator>(i);
    }
    return made;
  }();
  return generators->at(index < 0 ? current_index : index);
}

// ---------------------------------------------------------------------------------------------
// What torch asks about the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_index); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_index = with_index(device).index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// The macro below registers the class under this name, which torch looks up. A CUDA build has
// registered its own before, with the default priority.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current_index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_index = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_index, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_index : exchangeDevice(index);
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void*) const override { return device_at(current_index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_index : index);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {
    wait_for_device("synchronize", "device");
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);

// ---------------------------------------------------------------------------------------------
// Aliases: the same bytes as tensors of the CPU

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kCuda;
}

// The bytes of a storage as the CPU's. They keep the storage alive.
c10::DataPtr memory_of(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  return {
      storage.mutable_data(), owner,
      [](void* context) { delete static_cast<c10::Storage*>(context); },
      c10::Device(c10::DeviceType::CPU)};
}

void copy_geometry(const c10::TensorImpl* source, c10::TensorImpl* target) {
  target->set_sizes_and_strides(source->sizes(), source->strides(), source->storage_offset());
}

// The aliases of one call.
class Aliases {
 public:
  explicit Aliases(c10::Device device) : device_(device) {}

  at::Tensor alias(const at::Tensor& tensor) {
    auto known = by_original_.find(tensor.unsafeGetTensorImpl());
    if (known != by_original_.end()) {
      return known->second;
    }
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        alias(tensor.storage()), kCpuKernels, tensor.dtype());
    copy_geometry(tensor.unsafeGetTensorImpl(), impl.get());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    at::Tensor result(std::move(impl));
    by_original_.emplace(tensor.unsafeGetTensorImpl(), result);
    by_alias_.emplace(result.unsafeGetTensorImpl(), tensor);
    return result;
  }

  c10::Storage alias(const c10::Storage& storage) {
    auto* original = storage.unsafeGetStorageImpl();
    auto known = storages_by_original_.find(original);
    if (known != storages_by_original_.end()) {
      return known->second;
    }
    c10::Storage result(
        c10::Storage::use_byte_size_t(), storage.nbytes(), memory_of(storage),
        c10::GetCPUAllocator(), /*resizable=*/true);
    storages_by_original_.emplace(original, result);
    originals_by_storage_.emplace(result.unsafeGetStorageImpl(), storage);
    return result;
  }

  // The device's tensor for a result of the CPU's kernel.
  at::Tensor original(const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    auto known = by_alias_.find(result.unsafeGetTensorImpl());
    if (known != by_alias_.end()) {
      return known->second;
    }
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        original(result.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
    copy_geometry(result.unsafeGetTensorImpl(), impl.get());
    return at::Tensor(std::move(impl));
  }

  // Give the originals what the kernel changed of its arguments: size, storage and memory.
  void update_originals() {
    for (auto& [alias_impl, tensor] : by_alias_) {
      auto* impl = tensor.unsafeGetTensorImpl();
      const auto& storage = originals_by_storage_.find(alias_impl->storage().unsafeGetStorageImpl());
      if (storage == originals_by_storage_.end()) {
        impl->set_storage_keep_dtype(original(alias_impl->storage()));
      } else if (storage->second.unsafeGetStorageImpl() != impl->storage().unsafeGetStorageImpl()) {
        impl->set_storage_keep_dtype(storage->second);
      }
      if (impl->sizes() != alias_impl->sizes() || impl->strides() != alias_impl->strides() ||
          impl->storage_offset() != alias_impl->storage_offset()) {
        copy_geometry(alias_impl, impl);
      }
    }
    for (auto& [alias_impl, storage] : originals_by_storage_) {
      auto* impl = storage.unsafeGetStorageImpl();
      if (impl->data() != alias_impl->data() || impl->nbytes() != alias_impl->nbytes()) {
        const auto size = alias_impl->nbytes();
        impl->set_data_ptr(
            on_device(alias_impl->set_data_ptr(c10::DataPtr()), size, impl->device()));
        impl->set_nbytes(size);
      }
    }
  }

 private:
  c10::Storage original(const c10::Storage& storage) {
    auto known = originals_by_storage_.find(storage.unsafeGetStorageImpl());
    if (known != originals_by_storage_.end()) {
      return known->second;
    }
    c10::Storage result(
        c10::Storage::use_byte_size_t(), storage.nbytes(),
        on_device(memory_of(storage), storage.nbytes(), device_), &device_allocator,
        /*resizable=*/true);
    originals_by_storage_.emplace(storage.unsafeGetStorageImpl(), result);
    kept_.push_back(storage);
    return result;
  }

  c10::Device device_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> by_original_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> by_alias_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_by_original_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> originals_by_storage_;
  std::vector<c10::Storage> kept_;
};

// Apply a function to every tensor of a value: in lists, in lists of lists, or alone.
template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      result.push_back(function(tensor));
    }
    return result;
  }
  if (value.isList()) {
    const auto list = value.toList();
    auto result = c10::impl::GenericList(list.elementType());
    for (const c10::IValue& item : list) {
      result.push_back(map_tensors(item, function));
    }
    return result;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> items;
    for (const c10::IValue& item : value.toTupleRef().elements()) {
      items.push_back(map_tensors(item, function));
    }
    return c10::ivalue::Tuple::create(std::move(items));
  }
  return value;
}

// ---------------------------------------------------------------------------------------------
// Rules of devices

using Names = std::unordered_set<std::string>;

// Operations of which CUDA reads host tensors of one number as numbers, by full name.
Names takes_host_numbers;
// Operations whose index tensors may be on the host, from where they are copied.
const Names kTakesHostIndices = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
// Operations whose result has a size, or a value, that the host must read.
const Names kReads = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::repeat_interleave", "aten::is_nonzero", "aten::histc"};

bool is_mask(const c10::IValue& index) {
  if (!index.isTensor() || !index.toTensor().defined()) {
    return false;
  }
  const auto dtype = index.toTensor().scalar_type();
  return dtype == at::kBool || dtype == at::kByte;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        name_(schema_.name()),
        stack_(stack),
        start_(stack->size() - schema_.arguments().size()) {}

  // Run the CPU's kernel on aliases of the arguments, and replace them by its results.
  void run_on_cpu() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasKernelForDispatchKey(c10::DispatchKey::CPU), "pretended device: ", full_name(),
        " has no kernel for the CPU, which would compute it here");
    const c10::Device device = find_device();
    check_devices(device);
    count_waits();
    Aliases aliases(device);
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto& argument = (*stack_)[start_ + i];
      argument = host_argument(argument, i, aliases, device);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    op_.redispatchBoxed(kCpuKernels, stack_);
    aliases.update_originals();
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); ++i) {
      (*stack_)[i] = map_tensors((*stack_)[i], [&](const at::Tensor& tensor) {
        return aliases.original(tensor);
      });
    }
  }

 private:
  const c10::IValue& argument(size_t i) const { return (*stack_)[start_ + i]; }

  template <typename Function>
  void visit_tensors(const Function& function) const {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      map_tensors(argument(i), [&](const at::Tensor& tensor) {
        if (tensor.defined()) {
          function(tensor, i);
        }
        return tensor;
      });
    }
  }

  std::string full_name() const {
    const auto& overload = schema_.overload_name();
    return overload.empty() ? name_ : name_ + "." + overload;
  }

  c10::Device find_device() const {
    std::optional<c10::Device> device;
    visit_tensors([&](const at::Tensor& tensor, size_t) {
      if (!device && tensor.device().type() == kCuda) {
        device = tensor.device();
      }
    });
    for (size_t i = 0; !device && i < schema_.arguments().size(); ++i) {
      if (argument(i).isDevice() && argument(i).toDevice().type() == kCuda) {
        device = with_index(argument(i).toDevice());
      } else if (argument(i).isStorage() && argument(i).toStorage().device_type() == kCuda) {
        device = argument(i).toStorage().device();
      }
    }
    return device.value_or(device_at(current_index));
  }

  void check_devices(c10::Device device) const {
    const bool takes_numbers = takes_host_numbers.count(full_name()) > 0;
    const bool takes_indices = kTakesHostIndices.count(name_) > 0;
    visit_tensors([&](const at::Tensor& tensor, size_t i) {
      if (tensor.device() == device) {
        return;
      }
      const auto& declared = schema_.arguments()[i];
      const bool is_written = declared.alias_info() && declared.alias_info()->isWrite();
      const bool is_host = tensor.device().is_cpu();
      if (is_host && takes_numbers && tensor.dim() == 0 && !is_written) {
        return;
      }
      if (is_host && takes_indices && declared.name() == "indices") {
        wait_for_device("upload", name_);
        return;
      }
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, ",
          device, " and ", tensor.device(), "! (when checking argument ", declared.name(),
          " in method ", name_, ")");
    });
  }

  void count_waits() const {
    if (kReads.count(name_) > 0 && !has_output_size()) {
      wait_for_device("read", name_);
    }
    if (kTakesHostIndices.count(name_) > 0) {
      for (const c10::IValue& index : argument(1).toList()) {
        if (is_mask(index)) {
          wait_for_device("read", name_ + " by a mask");
        }
      }
    }
  }

  // True for repeat_interleave with a size that the caller knows.
  bool has_output_size() const {
    if (name_ == "aten::histc" || name_ != "aten::repeat_interleave") {
      return false;
    }
    return !argument(schema_.arguments().size() - 1).isNone();
  }

  c10::IValue host_argument(
      const c10::IValue& value, size_t i, Aliases& aliases, c10::Device device) const {
    if (value.isDevice() && value.toDevice().type() == kCuda) {
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isStorage() && value.toStorage().device_type() == kCuda) {
      return aliases.alias(value.toStorage());
    }
    const auto& declared = schema_.arguments()[i];
    if (declared.name() == "generator") {
      return host_generator(value, device);
    }
    if (declared.name() == "pin_memory" && value.isBool()) {
      TORCH_CHECK(!value.toBool(), "Only dense CPU tensors can be pinned");
      return c10::IValue();
    }
    return map_tensors(value, [&](const at::Tensor& tensor) {
      return is_on_device(tensor) ? aliases.alias(tensor) : tensor;
    });
  }

  c10::IValue host_generator(const c10::IValue& value, c10::Device device) const {
    const at::Generator generator =
        value.isNone() ? default_generator(device.index()) : value.toGenerator();
    TORCH_CHECK(
        generator.device() == device, "Expected a '", device, "' device type for generator but "
        "found '", generator.device(), "' (in method ", name_, ")");
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  size_t start_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run_on_cpu();
}

// ---------------------------------------------------------------------------------------------
// Operations with rules of their own

at::Tensor host_alias(const at::Tensor& tensor, Aliases& aliases) {
  return is_on_device(tensor) ? aliases.alias(tensor) : tensor;
}

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  Aliases aliases(is_on_device(target) ? target.device() : source.device());
  at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor from = host_alias(source, aliases);
  at::Tensor to = host_alias(target, aliases);
  const bool is_read = !is_on_device(target);
  const bool is_upload = !is_on_device(source);
  const at::Tensor& host = is_read ? target : source;
  const bool is_late = non_blocking && (is_read || is_upload) && is_pinned(host.const_data_ptr());
  if ((is_read || is_upload) && !is_late) {
    wait_for_device(is_read ? "read" : "upload", "aten::copy_");
  }
  to.copy_(from);
  if (is_late && is_read) {
    const at::Tensor value = snapshot(to);
    std::memset(to.storage().mutable_data(), kPoison, to.storage().nbytes());
    std::lock_guard<std::mutex> lock(memory_mutex);
    pending_reads.push_back({to, value});
  } else if (is_late) {
    const at::Tensor value = snapshot(from);
    std::lock_guard<std::mutex> lock(memory_mutex);
    pending_uploads.push_back({from, value});
  }
  return target;
}

void record_stream(at::Tensor&, c10::Stream) {}

// A collective of a group on the device, by the same backend on aliases.
void run_collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t start = stack->size() - schema.arguments().size();
  Aliases aliases(device_at(current_index));
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& argument = (*stack)[start + i];
    if (schema.arguments()[i].name() == "process_group") {
      auto group = argument.toCustomClass<c10d::ProcessGroup>();
      auto host_group = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
      host_group->setBackend(
          c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
          group->getBackend(kCuda));
      host_group->setGroupName(group->getGroupName());
      argument = c10::IValue(std::move(host_group));
      continue;
    }
    argument = map_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      TORCH_CHECK(
          tensor.device().type() == kCuda && tensor.device().index() == current_index,
          "pretended device: ", schema.name(), " got a tensor on ", tensor.device(),
          ", but this rank's device is ", device_at(current_index));
      return aliases.alias(tensor);
    });
  }
  op.redispatchBoxed(kCpuKernels, stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      return aliases.original(tensor);
    });
  }
}

// The bytes of a tensor of the device as a tensor of the CPU, for kernels of our own.
at::Tensor as_host(const at::Tensor& tensor) {
  return Aliases(tensor.device()).alias(tensor);
}

// The bytes of a tensor of the CPU as a tensor of the current device.
at::Tensor as_device(const at::Tensor& tensor) {
  return Aliases(device_at(current_index)).original(tensor);
}

TORCH_LIBRARY(pretended_device, m) {
  m.def("as_host(Tensor tensor) -> Tensor");
  m.def("as_device(Tensor tensor) -> Tensor");
  m.def("default_generator(int index) -> Generator?");
  m.impl("default_generator", c10::DispatchKey::CompositeExplicitAutograd, [](int64_t index) {
    return default_generator(static_cast<c10::DeviceIndex>(index));
  });
  m.impl("as_host", c10::DispatchKey::CUDA, TORCH_FN(as_host));
  m.impl("as_device", c10::DispatchKey::CPU, TORCH_FN(as_device));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", TORCH_FN(copy));
  m.impl("record_stream", TORCH_FN(record_stream));
}

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The library replaces torch's own kernels of collectives, which torch warns of.
void register_collectives() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static torch::Library library(
      torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier", "send", "recv_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
}

// Compose an operation of others. Nothing has kernels for this key: only composition is left.
template <c10::DispatchKey without_kernels>
void compose(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(without_kernels), stack);
}

// How the CPU computes an operation that the fallback does not reach.
enum class Way { kFallback, kKernel, kComposition };

Way way_of(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const bool is_for_cuda = op.hasKernelForDispatchKey(DispatchKey::CUDA);
  const bool has_composition =
      op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  if (op.hasKernelForDispatchKey(DispatchKey::CPU)) {
    return is_for_cuda || has_composition ? Way::kKernel : Way::kFallback;
  }
  if (!is_for_cuda) {
    return Way::kFallback;
  }
  return has_composition ? Way::kComposition : Way::kKernel;
}

// Operations that torch would compose of others on this device although the CPU has a kernel, and
// those for which a CUDA build has kernels, do what the CPU does: gradients of other compositions
// differ in their last bits.
void register_operations() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  using c10::DispatchKey;
  static torch::Library kernels(
      torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  static torch::Library gradients(
      torch::Library::IMPL, "aten", DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const bool is_ours = name.name == "aten::copy_" || name.name == "aten::record_stream";
    if (!op || is_ours || name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    const auto full_name = c10::toString(name);
    const Way way = way_of(*op);
    if (way == Way::kKernel) {
      kernels.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    } else if (way == Way::kComposition) {
      kernels.impl(
          full_name.c_str(),
          torch::CppFunction::makeFromBoxedFunction<&compose<DispatchKey::HPU>>());
      gradients.impl(
          full_name.c_str(),
          torch::CppFunction::makeFromBoxedFunction<&compose<DispatchKey::AutogradHPU>>());
    }
  }
}

const bool is_registered = [] {
  register_collectives();
  register_operations();
  c10::SetAllocator(kCuda, &device_allocator);
  return true;
}();

}  // namespace

extern "C" {

void pretended_on_wait(WaitCallback callback) { wait_callback = callback; }

void pretended_takes_host_numbers(const char* operation) { takes_host_numbers.insert(operation); }

void pretended_finish_copies() { finish_copies(); }

void pretended_wait(const char* kind, const char* operation) { wait_for_device(kind, operation); }

void pretended_set_device(int index) { current_index = static_cast<c10::DeviceIndex>(index); }

int pretended_current_device() { return current_index; }

int64_t pretended_allocated() { return allocated_bytes; }

int64_t pretended_peak() { return peak_bytes; }

void pretended_reset_peak() { peak_bytes = allocated_bytes.load(); }
}
