// A device of torch whose memory is the host's and whose kernels are those of the CPU.
//
// Torch refuses to use its tensors where it refuses CUDA's: in numpy, as CPU tensors and next to
// them. An operation gets views of its arguments as CPU tensors, and its results become tensors of
// the device. Operations run in the thread of their caller and in order.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IValue;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;

std::mutex mutex;
std::map<std::string, int64_t> counters;

void count(const std::string& name, int64_t amount = 1) {
  std::lock_guard guard(mutex);
  counters[name] += amount;
}

std::atomic<bool> has_fp64{true};

void refuse_fp64(at::ScalarType dtype) {
  TORCH_CHECK(has_fp64 || dtype != at::kDouble, "fakedev has no fp64");
}

// Device values that reach the host. Python notes from where.
void on_read(const std::string& what) {
  static auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("fakedev::on_read", "");
  torch::jit::Stack stack{what};
  handle.callBoxed(stack);
}

// Memory.

struct Block {
  void* data;
  size_t size;
  DeviceIndex device;
  c10::Storage adopted;  // of the CPU tensor whose memory it is, if any
};

thread_local DeviceIndex current = 0;

struct DeviceMemory final : c10::DeviceAllocator {
  std::array<c10::CachingDeviceAllocator::DeviceStats, DEVICES> stats;

  static void release(void* context);

  c10::DataPtr own(void* data, size_t size, DeviceIndex device, c10::Storage adopted) {
    {
      std::lock_guard guard(mutex);
      stats[device].allocated_bytes[0].increase(size);
      stats[device].reserved_bytes[0].increase(size);
      stats[device].allocation[0].increase(1);
    }
    auto* block = new Block{data, size, device, std::move(adopted)};
    return {data, block, release, Device(KIND, device)};
  }
  c10::DataPtr allocate(size_t size) override {
    return own(size ? c10::alloc_cpu(size) : nullptr, size, current, {});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { count("empty_cache"); }
  void recordStream(const c10::DataPtr&, c10::Stream) override { count("record_stream"); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    count("memory statistics");
    std::lock_guard guard(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    count("memory statistics");
    std::lock_guard guard(mutex);
    for (auto* each : {&stats[device].allocated_bytes, &stats[device].reserved_bytes})
      (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    size_t total = size_t(8) << 30;
    return {total - getDeviceStats(device).allocated_bytes[0].current, total};
  }
};

DeviceMemory& memory() {
  static auto* made = new DeviceMemory;  // outlives the tensors of static objects
  return *made;
}

void DeviceMemory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard guard(mutex);
    auto& stats = memory().stats[block->device];
    stats.allocated_bytes[0].decrease(block->size);
    stats.reserved_bytes[0].decrease(block->size);
    stats.allocation[0].decrease(1);
  }
  if (!block->adopted) c10::free_cpu(block->data);
  delete block;
}

std::map<const char*, size_t>& pinned_ranges() {
  static auto* made = new std::map<const char*, size_t>;
  return *made;
}

struct PinnedMemory final : c10::Allocator {
  static void release(void* data) {
    {
      std::lock_guard guard(mutex);
      pinned_ranges().erase(static_cast<char*>(data));
    }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(std::max<size_t>(size, 1));
    count("pinned buffers");
    count("pinned bytes", size);
    std::lock_guard guard(mutex);
    pinned_ranges()[static_cast<char*>(data)] = size;
    return {data, data, release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

bool is_pinned(const void* data) {
  std::lock_guard guard(mutex);
  auto after = pinned_ranges().upper_bound(static_cast<const char*>(data));
  if (after == pinned_ranges().begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return data < start + size;
}

// Random numbers: those that the CPU draws from the same seed, of a generator of the device's own.

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  DeviceGenerator(DeviceIndex device, at::Generator inner)
      : GeneratorImpl(Device(KIND, device), c10::DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    return new DeviceGenerator(device().index(), inner.clone());
  }
};

DeviceIndex index_or_current(DeviceIndex index) { return index < 0 ? current : index; }

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(
      index_or_current(index), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = new std::array{new_generator(0), new_generator(1)};
  return (*all)[index_or_current(index)];
}

// For operations that take no generator, such as dropout.
void swap_default_generators() {
  auto host = at::detail::getDefaultCPUGenerator(), own = default_generator(-1);
  auto state = host.get_state();
  host.set_state(own.get_state());
  own.set_state(state);
}

// Devices, streams and events.
//
// An asynchronous copy is done as late as its stream allows: one to the device before the next
// operation in the stream, or when another stream waits for an event after it; one to the host when
// the host waits. Until then the target has no numbers.

using StreamKey = std::pair<DeviceIndex, c10::StreamId>;

struct Event {
  StreamKey stream;
  int64_t position;
};

struct Copy {
  int64_t position;
  Tensor source, target;
  std::function<void()> run;
};

thread_local std::array<c10::StreamId, DEVICES> streams{};
std::atomic<int64_t> last_stream{0}, last_copy{0};
std::map<StreamKey, std::deque<Copy>> pending;

StreamKey current_stream() { return {current, streams[current]}; }

enum class Waits { STREAM, HOST };

void finish_copies(
    StreamKey stream, Waits who = Waits::HOST,
    int64_t position = std::numeric_limits<int64_t>::max()) {
  std::deque<Copy> due, left;
  {
    std::lock_guard guard(mutex);
    for (auto& copy : pending[stream]) {
      const bool is_due = copy.position <= position &&
          (who == Waits::HOST || !copy.target.device().is_cpu());
      (is_due ? due : left).push_back(std::move(copy));
    }
    pending[stream].swap(left);
  }
  for (auto& copy : due) copy.run();
}

// Whether a copy of the stream reads what another one writes, or writes what it has yet to read.
bool follows_another(const Tensor& source, const Tensor& target) {
  std::lock_guard guard(mutex);
  for (const auto& copy : pending[current_stream()])
    if (copy.source.storage().is_alias_of(target.storage()) ||
        copy.target.storage().is_alias_of(source.storage()))
      return true;
  return false;
}

void finish_copies_of(DeviceIndex device) {
  std::vector<StreamKey> found;
  {
    std::lock_guard guard(mutex);
    for (const auto& [stream, copies] : pending)
      if (stream.first == device) found.push_back(stream);
  }
  for (const auto& stream : found) finish_copies(stream);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "fakedev has ", int(DEVICES), " devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    device = {KIND, index_or_current(device.index())};
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, {KIND, index_or_current(device.index())}, 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    count("streams");
    return c10::Stream(
        c10::Stream::UNSAFE, {KIND, index_or_current(device.index())}, ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    if (stream.id() != before.id()) count("stream switches");
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(
      void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    count("events recorded");
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {{stream.device_index(), stream.id()}, last_copy};
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  static void wait(void* event, Waits who) {
    auto* recorded = static_cast<Event*>(event);
    if (recorded) finish_copies(recorded->stream, who, recorded->position);
  }
  void block(void* event, const c10::Stream&) const override {
    count("events awaited by streams");
    wait(event, Waits::STREAM);
  }
  bool queryEvent(void* event) const override {
    wait(event, Waits::HOST);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    on_read("stream.synchronize");
    finish_copies({stream.device_index(), stream.id()});
  }
  void synchronizeEvent(void* event) const override {
    on_read("event.synchronize");
    wait(event, Waits::HOST);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    on_read("synchronize");
    finish_copies_of(index_or_current(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    count("record_stream");
  }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({KIND, device}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({KIND, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* made = new PinnedMemory;
    return made;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Views of a call's tensors as CPU tensors, and back.

struct Views {
  explicit Views(const c10::OperatorHandle& op) : op(op) {}

  const c10::OperatorHandle& op;
  std::optional<DeviceIndex> device;
  std::vector<std::pair<Tensor, Tensor>> tensors;  // on the device, its view
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;

  c10::Storage host_storage(const c10::Storage& storage) {
    for (auto& [original, view] : storages)
      if (original.is_alias_of(storage)) return view;
    auto pointer = c10::DataPtr(storage.mutable_data(), c10::kCPU);
    c10::Storage view(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer));
    storages.emplace_back(storage, view);
    return view;
  }

  static Tensor over(const c10::Storage& storage, DispatchKey key, const Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        like.sizes(), like.strides(), like.storage_offset());
    return made;
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != KIND) {
      // As with other devices, numbers may be on the host.
      TORCH_CHECK(tensor.dim() == 0, op.operator_name(), " got tensors of fakedev and a tensor of ",
                  tensor.device(), " of shape ", tensor.sizes());
      return tensor;
    }
    auto index = tensor.device().index();
    TORCH_CHECK(!device || *device == index, op.operator_name(), " got tensors of two devices");
    device = index;
    for (auto& [original, view] : tensors)
      if (original.is_same(tensor)) return view;
    // An empty one may be what a kernel is to resize, and has no memory to share.
    auto view = tensor.storage().nbytes()
        ? over(host_storage(tensor.storage()), DispatchKey::CPU, tensor)
        : at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
    tensors.emplace_back(tensor, view);
    return view;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    refuse_fp64(tensor.scalar_type());
    for (auto& [original, view] : tensors)
      if (view.is_same(tensor)) return original;
    for (auto& [original, view] : storages)
      if (view.is_alias_of(tensor.storage()))
        return over(original, DispatchKey::PrivateUse1, tensor);
    return over(adopt(tensor.storage()), DispatchKey::PrivateUse1, tensor);
  }

  // Moves a result into the device's memory, where it already is.
  c10::Storage adopt(const c10::Storage& storage) {
    auto size = storage.nbytes();
    auto pointer = memory().own(storage.mutable_data(), size, device.value_or(current), storage);
    return {c10::Storage::use_byte_size_t(), size, std::move(pointer), &memory(), true};
  }

  void finish() {
    for (auto& [original, view] : tensors)
      if (original.sizes() != view.sizes()) {
        auto* impl = original.unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(adopt(view.storage()));
        impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
      }
  }

  template <typename Each>
  static void replace(IValue& value, const Each& each) {
    if (value.isTensor()) {
      value = each(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorList().vec()) made.push_back(each(tensor));
      value = made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        made.push_back(tensor ? std::optional(each(*tensor)) : tensor);
      value = made;
    }
  }
};

// Whether a result's shape or value is not known before the values of the arguments are.
bool waits(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  if (op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  const auto& name = op.schema().name();
  if (name == "aten::repeat_interleave") return arguments.back().isNone();  // no output_size
  if (name != "aten::index") return true;
  for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorVector())
    if (index && index->defined() &&
        (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
      return true;
  return false;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  finish_copies(current_stream(), Waits::STREAM);
  const auto& schema = op.schema();
  auto begin = stack->end() - schema.arguments().size();
  Views views(op);
  if (waits(op, {begin, stack->end()})) on_read(schema.name());
  bool draws_from_host = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    IValue& value = *(begin + i);
    const auto type = schema.arguments()[i].type()->str();
    if (type.starts_with("Generator")) {
      draws_from_host = false;
      auto generator = value.isNone() ? default_generator(-1) : value.toGenerator();
      TORCH_CHECK(generator.device().type() == KIND, schema.name(), " got a generator of ",
                  generator.device());
      value = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      views.device = index_or_current(value.toDevice().index());
      value = Device(c10::kCPU);
    } else {
      Views::replace(value, [&](const Tensor& tensor) { return views.to_host(tensor); });
    }
  }
  if (draws_from_host) swap_default_generators();
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  if (draws_from_host) swap_default_generators();
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value)
    Views::replace(*value, [&](const Tensor& tensor) { return views.to_device(tensor); });
  views.finish();
}

// What has no kernel of the CPU to run.

Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> memory_format) {
  refuse_fp64(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(device.value_or(Device(KIND)));
  return at::detail::empty_generic(
      size, &memory(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  refuse_fp64(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(device.value_or(Device(KIND)));
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor view_on_host(const Tensor& tensor) {
  if (tensor.device().type() != KIND) return tensor;
  if (!tensor.storage().nbytes())
    return at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
  auto* kept = new c10::Storage(tensor.storage());
  c10::DataPtr pointer(
      kept->mutable_data(), kept, [](void* it) { delete static_cast<c10::Storage*>(it); },
      c10::kCPU);
  c10::Storage view(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(pointer));
  return Views::over(view, DispatchKey::CPU, tensor);
}

// For what runs in the current stream.
Tensor host_view(const Tensor& tensor) {
  finish_copies(current_stream(), Waits::STREAM);
  return view_on_host(tensor);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool from_host = source.device().is_cpu(), to_host = target.device().is_cpu();
  const auto& on_host = from_host ? source : target;
  const bool crosses = (from_host || to_host) && target.numel();
  if (crosses && non_blocking && is_pinned(on_host.const_data_ptr())) {
    count(to_host ? "copies to pinned memory" : "copies from pinned memory");
    if (follows_another(source, target)) finish_copies(current_stream());
    // What the stream does next may change a source on the device.
    auto values = to_host ? view_on_host(source).clone() : source;
    auto view = view_on_host(target);
    if (target.is_non_overlapping_and_dense())
      std::memset(view.mutable_data_ptr(), 0xff, target.numel() * target.element_size());
    auto copy = [values, view] { view.copy_(values); };
    std::lock_guard guard(mutex);
    pending[current_stream()].push_back({++last_copy, source, target, copy});
    return target;
  }
  finish_copies(current_stream(), crosses ? Waits::HOST : Waits::STREAM);
  if (crosses) on_read(to_host ? "copy" : "copy to the device");
  view_on_host(target).copy_(view_on_host(source));
  return target;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  on_read("item");
  finish_copies(current_stream());
  return view_on_host(tensor).item();
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "storage of ", source.device(), " for a tensor of ",
              self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, size, {});
}

const Tensor& resize(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto* storage = self.storage().unsafeGetStorageImpl();
    auto pointer = memory().allocate(bytes);
    std::memcpy(pointer.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(pointer));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

// Whether a parameter can move between host and device without becoming another object.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  return self.layout() == from.layout();
}

void record_stream(Tensor&, at::Stream) { count("record_stream"); }

Tensor get_rng_state(int64_t device) { return default_generator(device).get_state(); }

void set_rng_state(int64_t device, const Tensor& state) {
  auto generator = default_generator(device);
  generator.set_state(state);
}

c10::Dict<std::string, int64_t> take_counters() {
  std::lock_guard guard(mutex);
  c10::Dict<std::string, int64_t> taken;
  for (const auto& [name, value] : counters) taken.insert(name, value);
  counters.clear();
  return taken;
}

void set_fp64(bool value) { has_fp64 = value; }

int64_t attention_kernel(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kernel);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("resize_", resize);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  library.impl("record_stream", record_stream);
  // Torch's own reads the ends of the groups, as the kernels of devices do not.
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(fakedev, library) {
  library.def("on_read(str what) -> ()");
  library.def("host_view(Tensor tensor) -> Tensor", host_view);
  library.def("get_rng_state(int device) -> Tensor", get_rng_state);
  library.def("set_rng_state(int device, Tensor state) -> ()", set_rng_state);
  library.def("set_fp64(bool value) -> ()", set_fp64);
  library.def("take_counters() -> Dict(str, int)", take_counters);
  c10::SetAllocator(KIND, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
