// An accelerator that runs late, on the host: PyTorch's PrivateUse1 device, for tests of code that orders streams.
//
// Operators, copies and frees are queued on streams and run when the schedule lets them, on raw addresses, so whoever
// forgot to wait reads or writes what he should not. Beside that every queued item is checked when it is queued: vector
// clocks of streams and the host say what is ordered, and two accesses to the same bytes that are not are a race,
// whatever the schedule makes of them. Nothing runs in a thread of its own: items run inside of whatever call into the
// device comes next, so one seed gives one order.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <unordered_map>

namespace at::autocast {  // their header takes as long to compile as all of this file
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, c10::DeviceType);
}  // namespace at::autocast

namespace {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 33;  // the default one and a pool of 32, as CUDA has it
constexpr int kHost = kStreams;
constexpr size_t kLongestQueue = 4096;
const c10::Device kDevice(kType, 0);

// --- who waited for whom -------------------------------------------------------------------------------------------

using Clock = std::array<uint64_t, kStreams + 1>;

void join(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Range {
  uintptr_t start, stop;
};

const char* interned(const std::string& name) {
  static std::set<std::string> names;
  return names.insert(name).first->c_str();
}

// One line into the file that `STANDIN_REPORT` names: for processes whose end nobody can wait for.
void report(const std::string& line) {
  if (const char* path = std::getenv("STANDIN_REPORT"))
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\n", line.c_str());
      std::fclose(file);
    }
}

// Who touched which bytes last, and the races among them.
class Watch {
 public:
  void touch(const Range& range, bool writes, int actor, const Clock& clock, const char* what) {
    if (range.start >= range.stop) return;
    split(range.start);
    split(range.stop);
    const Access access{actor, clock[actor], what};
    auto it = cells_.lower_bound(range.start);
    if (writes) {
      for (; it != cells_.end() && it->first < range.stop; it = cells_.erase(it)) {
        check(it->second.write, access, clock, "writes", "wrote", it->first);
        for (const auto& read : it->second.reads) check(read, access, clock, "writes", "reads", it->first);
      }
      cells_[range.start] = Cell{range.stop, access, {}};
      return;
    }
    auto at = range.start;
    while (at < range.stop) {
      if (it == cells_.end() || it->first > at) {  // bytes that nobody touched yet
        const auto stop = it == cells_.end() ? range.stop : std::min(range.stop, it->first);
        it = cells_.emplace_hint(it, at, Cell{stop, Access{}, {}});
      }
      auto& cell = it->second;
      check(cell.write, access, clock, "reads", "wrote", at);
      auto mine = std::find_if(cell.reads.begin(), cell.reads.end(), [&](auto& r) { return r.actor == actor; });
      if (mine == cell.reads.end()) cell.reads.push_back(access);
      else *mine = access;
      at = cell.stop;
      ++it;
    }
  }

  // What came before a moment is known to be over there, for a reason that orders nothing else.
  void forgive(const Range& range, const Clock& moment) {
    const auto over = [&](const Access& a) { return a.actor >= 0 && a.time <= moment[a.actor]; };
    for (auto it = cells_.lower_bound(range.start); it != cells_.end() && it->first < range.stop; ++it) {
      auto& cell = it->second;
      if (over(cell.write)) cell.write = Access{};
      cell.reads.erase(std::remove_if(cell.reads.begin(), cell.reads.end(), over), cell.reads.end());
    }
  }

  void forget(const Range& range) {
    split(range.start);
    split(range.stop);
    cells_.erase(cells_.lower_bound(range.start), cells_.lower_bound(range.stop));
  }

  void clear() {
    races.clear();
    seen_.clear();
  }

  std::vector<std::string> races;

 private:
  struct Access {
    int actor = -1;
    uint64_t time = 0;
    const char* what = "";
  };
  struct Cell {
    uintptr_t stop;
    Access write;
    std::vector<Access> reads;
  };

  void split(uintptr_t at) {
    auto it = cells_.upper_bound(at);
    if (it == cells_.begin()) return;
    --it;
    if (it->first == at || it->second.stop <= at) return;
    Cell rest = it->second;
    it->second.stop = at;
    cells_.emplace(at, std::move(rest));
  }

  void check(const Access& before, const Access& now, const Clock& clock, const char* does, const char* did,
             uintptr_t address) {
    if (before.actor < 0 || clock[before.actor] >= before.time || races.size() >= 100) return;
    const auto who = [](int actor) { return actor == kHost ? std::string("the host") : c10::str("stream ", actor); };
    auto text = c10::str(now.what, " on ", who(now.actor), " ", does, " what ", before.what, " on ", who(before.actor),
                         " ", did, ": neither waits for the other");
    if (!seen_.insert(text).second) return;
    races.push_back(c10::str(text, " (address ", address, ")"));
    report(races.back());
  }

  std::map<uintptr_t, Cell> cells_;
  std::set<std::string> seen_;
};

// --- queues and when they run --------------------------------------------------------------------------------------

enum class Kind { Kernel, Copy, Free, Record, Wait };
enum class Schedule { Eager, Lazy, Random, ComputeLate, CopiesLate };

// One recording of an event.
struct Mark {
  int stream;
  uint64_t index;
  Clock clock;
  bool done = false;
  std::chrono::steady_clock::time_point when;
};

struct Event {
  std::shared_ptr<Mark> mark;
};

struct Item {
  Kind kind;
  const char* name;
  std::function<void()> run;
  std::shared_ptr<Mark> mark;
};

struct StreamState {
  std::deque<Item> queue;
  uint64_t issued = 0, executed = 0;
  Clock clock{};
};

thread_local int current_stream = 0;

// Kernels run as if nobody had asked for gradients, autocast or dispatch modes, whoever's call they happen to run in.
struct Plainly {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot})};
  at::AutoGradMode grad{false};
  at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  Plainly() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Plainly() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

class Queues {
 public:
  std::recursive_mutex lock;
  Watch watch;
  Schedule schedule = Schedule::Random;
  std::mt19937_64 dice{0};
  std::map<std::string, int64_t> counts;

  std::shared_ptr<Mark> put(int stream, Kind kind, const char* name, std::function<void()> run,
                            const std::vector<Range>& reads, const std::vector<Range>& writes) {
    auto& s = streams_[stream];
    join(s.clock, host_);
    s.clock[stream] = ++s.issued;
    for (const auto& range : reads) watch.touch(range, false, stream, s.clock, name);
    for (const auto& range : writes) watch.touch(range, true, stream, s.clock, name);
    std::shared_ptr<Mark> mark;
    if (kind == Kind::Record) mark = std::make_shared<Mark>(Mark{stream, s.issued, s.clock, false, {}});
    s.queue.push_back({kind, name, std::move(run), mark});
    ++counts[kind == Kind::Kernel ? "kernels" : kind == Kind::Copy ? "copies" : "others"];
    drive();
    return mark;
  }

  std::shared_ptr<Mark> record(int stream) { return put(stream, Kind::Record, "an event", {}, {}, {}); }

  void wait(int stream, const std::shared_ptr<Mark>& mark) {
    auto& s = streams_[stream];
    join(s.clock, host_);
    s.clock[stream] = ++s.issued;
    join(s.clock, mark->clock);
    s.queue.push_back({Kind::Wait, "a wait", {}, mark});
    drive();
  }

  // Run what a moment on a stream needs. Orders nothing.
  void run_until(int stream, uint64_t index) {
    auto& s = streams_[stream];
    while (s.executed < index) {
      if (schedule == Schedule::Random && dice() % 2) step(static_cast<int>(dice() % kStreams));
      if (s.executed >= index) break;
      auto& head = s.queue.front();
      if (head.kind == Kind::Wait && !head.mark->done) run_until(head.mark->stream, head.mark->index);
      run_head(stream);
    }
  }

  void run_all() {
    for (int i = 0; i < kStreams; ++i) run_until(i, streams_[i].issued);
  }

  bool executed(int stream, uint64_t index) const { return streams_[stream].executed >= index; }
  uint64_t issued(int stream) const { return streams_[stream].issued; }

  void synchronize(int stream) {
    ++counts["host waits"];
    run_until(stream, streams_[stream].issued);
    join(host_, streams_[stream].clock);
    raise_error();
  }

  void synchronize() {
    ++counts["host waits"];
    run_all();
    for (auto& s : streams_) join(host_, s.clock);
    raise_error();
  }

  void synchronize(const Mark& mark) {
    ++counts["host waits"];
    run_until(mark.stream, mark.index);
    join(host_, mark.clock);
    raise_error();
  }

  bool query(const Mark& mark) {
    if (mark.done) join(host_, mark.clock);
    return mark.done;
  }

  void host_touches(const Range& range, bool writes, const char* what) {
    ++host_[kHost];
    watch.touch(range, writes, kHost, host_, what);
  }

 private:
  bool runnable(int stream, bool forced) {
    auto& queue = streams_[stream].queue;
    if (queue.empty()) return false;
    auto& head = queue.front();
    if (head.kind == Kind::Wait && !head.mark->done) return false;
    if (forced) return true;
    if (schedule == Schedule::ComputeLate) return head.kind != Kind::Kernel && head.kind != Kind::Free;
    if (schedule == Schedule::CopiesLate) return head.kind != Kind::Copy;
    return true;
  }

  bool step(int stream) {
    if (!runnable(stream, schedule == Schedule::Random)) return false;
    run_head(stream);
    return true;
  }

  // What the schedule does of its own after each item.
  void drive() {
    for (auto& s : streams_)
      if (s.queue.size() > kLongestQueue) run_until(static_cast<int>(&s - streams_.data()), s.issued - kLongestQueue / 2);
    if (schedule == Schedule::Lazy) return;
    if (schedule == Schedule::Random) {
      while (dice() % 3) step(static_cast<int>(dice() % kStreams) % (dice() % 2 ? kStreams : 4));
      return;
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (int i = 0; i < kStreams; ++i)
        while (step(i)) moved = true;
    }
  }

  void run_head(int stream) {
    auto& s = streams_[stream];
    Item item = std::move(s.queue.front());
    s.queue.pop_front();
    ++s.executed;
    if (item.kind == Kind::Record) {
      item.mark->done = true;
      item.mark->when = std::chrono::steady_clock::now();
    } else if (item.run) {
      try {
        Plainly plainly;
        item.run();
      } catch (const std::exception& error) {
        if (error_.empty()) error_ = c10::str("a queued ", item.name, " failed: ", error.what());
      }
    }
  }

  void raise_error() {
    if (error_.empty()) return;
    std::string text;
    text.swap(error_);
    TORCH_CHECK(false, text);
  }

  std::array<StreamState, kStreams> streams_;
  Clock host_{};
  std::string error_;
};

Queues& queues() {
  static auto* all = new Queues;  // never destroyed: tensors may outlive everything
  return *all;
}

// Whoever waits for the lock lets go of Python's own: its holder may need that, be it only to count references.
class Guarded {
 public:
  explicit Guarded(std::recursive_mutex& lock) : lock_(lock) {
    if (lock_.try_lock()) return;
    PyThreadState* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock_.lock();
    if (python) PyEval_RestoreThread(python);
  }
  ~Guarded() { lock_.unlock(); }
  Guarded(const Guarded&) = delete;

 private:
  std::recursive_mutex& lock_;
};

bool opened = false, forked = false;

void open_device() {
  TORCH_CHECK(!forked, "Cannot re-initialize the accelerator in forked subprocess: start it with 'spawn'");
  if (opened) return;
  opened = true;
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  report(c10::str("process ", getpid(), " opened the device"));
}

// --- memory --------------------------------------------------------------------------------------------------------

constexpr size_t kSmall = 1 << 20, kSmallSegment = 2 << 20, kLarge = 10 << 20, kLargeSegment = 20 << 20;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Block {
  char* start;
  size_t size;
  int stream;
  bool small, used = false;
  Block *before = nullptr, *after = nullptr;
  std::set<int> users;                           // streams it was recorded on, besides its own
  std::vector<std::shared_ptr<Mark>> awaited;    // after the free: what those streams still have to do
  Range range() const { return {reinterpret_cast<uintptr_t>(start), reinterpret_cast<uintptr_t>(start) + size}; }
};

struct Smallest {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->start < b->start;
  }
};

// CUDA's rules: a block belongs to a stream and may be handed out again there as soon as it is freed, in that stream's
// order; on other streams it may be used as long as somebody said so by `record`.
class Memory final : public c10::DeviceAllocator {
 public:
  size_t total = size_t{8} << 30, limit = total;

  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, kDevice};
    open_device();
    Guarded guard(queues().lock);
    Block* block = take(rounded(bytes, 512), current_stream);
    return {block->start, block->start, &Memory::deleted, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::deleted; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Guarded guard(queues().lock);
    const auto a = reinterpret_cast<uintptr_t>(from), b = reinterpret_cast<uintptr_t>(to);
    queues().put(current_stream, Kind::Kernel, "a clone", [=] { std::memcpy(to, from, bytes); }, {{a, a + bytes}},
                 {{b, b + bytes}});
  }
  bool initialized() override { return opened; }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Guarded guard(queues().lock);
    auto found = blocks_.find(static_cast<char*>(pointer.get()));
    if (found != blocks_.end() && stream.id() != found->second->stream)
      found->second->users.insert(static_cast<int>(stream.id()));
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Guarded guard(queues().lock);
    finish_frees(true);
    queues().run_all();
    for (auto& pool : free_)
      for (auto it = pool.second.begin(); it != pool.second.end();) {
        Block* block = *it;
        if (block->before || block->after) {
          ++it;
          continue;
        }
        it = pool.second.erase(it);
        queues().watch.forget(block->range());
        munmap(block->start, block->size);
        change(stats_.reserved_bytes, -static_cast<int64_t>(block->size));
        delete block;
      }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Guarded guard(queues().lock);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    Guarded guard(queues().lock);
    for (auto* stat : all_stats()) (*stat)[0].reset_accumulated();
    stats_.num_ooms = stats_.num_alloc_retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    Guarded guard(queues().lock);
    for (auto* stat : all_stats()) (*stat)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Guarded guard(queues().lock);
    return {total - stats_.reserved_bytes[0].current, total};
  }

 private:
  using Pool = std::set<Block*, Smallest>;

  static void deleted(void* pointer);

  std::array<c10::CachingAllocator::StatArray*, 5> all_stats() {
    return {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes, &stats_.allocation,
            &stats_.requested_bytes};
  }

  static void change(c10::CachingAllocator::StatArray& stat, int64_t by) {
    by >= 0 ? stat[0].increase(by) : stat[0].decrease(-by);
  }

  Block* take(size_t size, int stream) {
    finish_frees(false);
    const bool small = size <= kSmall;
    Block* block = fitting(size, stream, small);
    if (!block) block = fresh(size, stream, small);
    if (block->size - size >= (small ? 512 : kSmall + 1)) {
      auto* rest = new Block{block->start + size, block->size - size, stream, small};
      rest->before = block;
      rest->after = block->after;
      if (rest->after) rest->after->before = rest;
      block->after = rest;
      block->size = size;
      free_[{stream, small}].insert(rest);
    }
    block->used = true;
    blocks_[block->start] = block;
    change(stats_.allocated_bytes, block->size);
    change(stats_.requested_bytes, block->size);
    change(stats_.active_bytes, block->size);
    change(stats_.allocation, 1);
    return block;
  }

  Block* fitting(size_t size, int stream, bool small) {
    auto& pool = free_[{stream, small}];
    Block key{nullptr, size, stream, small};
    auto it = pool.lower_bound(&key);
    if (it == pool.end()) return nullptr;
    Block* block = *it;
    pool.erase(it);
    return block;
  }

  Block* fresh(size_t size, int stream, bool small) {
    const size_t bytes = small ? kSmallSegment : size < kLarge ? kLargeSegment : rounded(size, kSmallSegment);
    const auto fits = [&] { return stats_.reserved_bytes[0].current + bytes <= std::min(limit, total); };
    if (!fits()) {
      emptyCache();
      ++stats_.num_alloc_retries;
      if (Block* block = fitting(size, stream, small)) return block;  // frees that were waited for
    }
    if (!fits()) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory. Tried to allocate ", size, " bytes: ",
                       stats_.allocated_bytes[0].current, " bytes are allocated, ", stats_.reserved_bytes[0].current,
                       " reserved, of ", std::min(limit, total), " that may be");
    }
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "the host has no memory left for the device");
    std::memset(start, 0xFF, bytes);
    change(stats_.reserved_bytes, bytes);
    return new Block{static_cast<char*>(start), bytes, stream, small};
  }

  void give(void* pointer) {
    auto found = blocks_.find(static_cast<char*>(pointer));
    TORCH_INTERNAL_ASSERT(found != blocks_.end());
    Block* block = found->second;
    blocks_.erase(found);
    change(stats_.allocated_bytes, -static_cast<int64_t>(block->size));
    change(stats_.requested_bytes, -static_cast<int64_t>(block->size));
    change(stats_.allocation, -1);
    if (block->users.empty()) return back_to_pool(block);
    for (int user : block->users) block->awaited.push_back(queues().record(user));
    block->users.clear();
    awaiting_.push_back(block);
  }

  // Blocks that other streams used come back when these are found to be done with them.
  void finish_frees(bool wait) {
    for (auto it = awaiting_.begin(); it != awaiting_.end();) {
      Block* block = *it;
      auto& marks = block->awaited;
      if (wait)
        for (auto& mark : marks) queues().run_until(mark->stream, mark->index);
      if (!std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->done; })) {
        ++it;
        continue;
      }
      for (auto& mark : marks) queues().watch.forgive(block->range(), mark->clock);
      marks.clear();
      it = awaiting_.erase(it);
      back_to_pool(block);
    }
  }

  void back_to_pool(Block* block) {
    // whoever still looks at it sees NaN
    queues().put(block->stream, Kind::Free, "a free", [p = block->start, n = block->size] { std::memset(p, 0xFF, n); },
                 {}, {block->range()});
    change(stats_.active_bytes, -static_cast<int64_t>(block->size));
    block->used = false;
    auto& pool = free_[{block->stream, block->small}];
    if (Block* before = block->before; before && pool.count(before)) {
      pool.erase(before);
      block->start = before->start;
      block->size += before->size;
      block->before = before->before;
      if (block->before) block->before->after = block;
      delete before;
    }
    if (Block* after = block->after; after && pool.count(after)) {
      pool.erase(after);
      block->size += after->size;
      block->after = after->after;
      if (block->after) block->after->before = block;
      delete after;
    }
    pool.insert(block);
  }

  std::unordered_map<char*, Block*> blocks_;
  std::map<std::pair<int, bool>, Pool> free_;
  std::vector<Block*> awaiting_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

void Memory::deleted(void* pointer) {
  Guarded guard(queues().lock);
  memory().give(pointer);
}

// Host memory that copies may reach later. What is not registered here is copied while the caller waits.
class Pinned final : public at::HostAllocator {
 public:
  void add(uintptr_t start, size_t bytes) {
    Guarded guard(queues().lock);
    areas_[start] = Area{start + bytes, {}};
  }
  void remove(uintptr_t start) {
    Guarded guard(queues().lock);
    auto found = areas_.find(start);
    TORCH_CHECK(found != areas_.end(), "this host memory was never registered");
    const Range range{start, found->second.stop};
    queues().host_touches(range, true, "unregistering");
    queues().watch.forget(range);
    areas_.erase(found);
  }
  bool holds(const void* pointer) {
    Guarded guard(queues().lock);
    return area(reinterpret_cast<uintptr_t>(pointer)) != nullptr;
  }
  void used(const void* pointer, int stream) {
    if (auto* found = area(reinterpret_cast<uintptr_t>(pointer))) found->users[stream] = queues().issued(stream);
  }

  c10::DataPtr allocate(size_t bytes) override {
    Guarded guard(queues().lock);
    collect();
    if (!bytes) return {nullptr, c10::DeviceType::CPU};
    void* start = nullptr;
    TORCH_CHECK(!posix_memalign(&start, 4096, rounded(bytes, 4096)), "the host has no memory left to pin");
    std::memset(start, 0xFF, bytes);
    add(reinterpret_cast<uintptr_t>(start), bytes);
    return {start, start, &Pinned::deleted, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::deleted; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    Guarded guard(queues().lock);
    used(pointer, static_cast<int>(stream.id()));
    return holds(pointer);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Area {
    uintptr_t stop;
    std::map<int, uint64_t> users;
  };

  static void deleted(void* pointer);

  Area* area(uintptr_t address) {
    auto it = areas_.upper_bound(address);
    if (it == areas_.begin()) return nullptr;
    --it;
    return address < it->second.stop ? &it->second : nullptr;
  }

  // Give freed memory back that no queued copy looks at any more.
  void collect() {
    for (auto it = freed_.begin(); it != freed_.end();) {
      auto& found = areas_.at(*it);
      bool busy = false;
      for (auto [stream, index] : found.users) busy |= !queues().executed(stream, index);
      if (busy) {
        ++it;
        continue;
      }
      queues().watch.forget({*it, found.stop});
      areas_.erase(*it);
      std::free(reinterpret_cast<void*>(*it));
      it = freed_.erase(it);
    }
  }

  std::map<uintptr_t, Area> areas_;
  std::vector<uintptr_t> freed_;
};

Pinned& pinned() {
  static auto* all = new Pinned;
  return *all;
}

void Pinned::deleted(void* pointer) {
  Guarded guard(queues().lock);
  pinned().freed_.push_back(reinterpret_cast<uintptr_t>(pointer));
  pinned().collect();
}

// --- random numbers ------------------------------------------------------------------------------------------------

// Counts launches, as CUDA's does: what a kernel draws is settled when it is queued, not when it runs.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(kDevice, DispatchKeySet(DispatchKey::PrivateUse1)), seed_(seed) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "the state of this generator has 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    const uint64_t words[] = {seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), words, sizeof words);
    return state.getIntrusivePtr();
  }
  uint64_t next() {
    std::seed_seq mixed{uint32_t(seed_), uint32_t(seed_ >> 32), uint32_t(offset_), uint32_t(offset_ >> 32)};
    ++offset_;
    std::array<uint32_t, 2> words;
    mixed.generate(words.begin(), words.end());
    return uint64_t(words[0]) << 32 | words[1];
  }

 private:
  Generator* clone_impl() const override {
    auto* twin = new Generator(seed_);
    twin->offset_ = offset_;
    return twin;
  }
  uint64_t seed_, offset_ = 0;
};

const at::Generator& default_generator() {
  static const at::Generator one = at::make_generator<Generator>();
  return one;
}

// --- operators -----------------------------------------------------------------------------------------------------

Range range_of(const Tensor& t) {
  if (!t.defined() || !t.numel()) return {0, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto start = reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->storage().data()) +
      t.storage_offset() * t.element_size();
  return {start, start + (last + 1) * t.element_size()};
}

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kType; }

Tensor like_scalar(Tensor twin, const Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  return twin;
}

// CPU tensors over the same addresses. They keep nothing alive: memory is used when a kernel runs, as it is by then.
class RawTwins {
 public:
  Tensor operator()(const Tensor& t) {
    if (!t.defined()) return t;
    auto& twin = twins_[t.unsafeGetTensorImpl()];
    if (!twin.defined()) twin = on_device(t) ? raw(t) : like_scalar(t.clone(), t);
    return twin;
  }

 private:
  Tensor raw(const Tensor& t) {
    const auto& storage = t.storage();
    auto& area = areas_[storage.unsafeGetStorageImpl()];
    if (!area)
      area = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(const_cast<void*>(storage.data()), c10::DeviceType::CPU), nullptr, false);
    auto twin = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(area), DispatchKeySet(DispatchKey::CPU), t.dtype());
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return like_scalar(twin, t);
  }
  std::unordered_map<const c10::TensorImpl*, Tensor> twins_;
  std::unordered_map<const c10::StorageImpl*, c10::intrusive_ptr<c10::StorageImpl>> areas_;
};

class MetaTwins {
 public:
  Tensor operator()(const Tensor& t) {
    if (!t.defined()) return t;
    auto& twin = twins_[t.unsafeGetTensorImpl()];
    if (twin.defined()) return twin;
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) return twin = like_scalar(t.clone(), t);  // a Python scalar
    return twin = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  }

 private:
  std::unordered_map<const c10::TensorImpl*, Tensor> twins_;
};

// A value with every tensor in it replaced, and every device.
template <class Replace>
c10::IValue replaced(const c10::IValue& value, Replace&& replace, c10::DeviceType device) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(replace(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t.has_value() ? std::optional<Tensor>(replace(*t)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(device);
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& see) {
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList())
    replaced(value, [&](const Tensor& t) { return see(t), t; }, kType);
}

// One call of an operator: what it was given, and what of that it changes.
struct Call {
  const c10::OperatorHandle& op;
  c10::ArrayRef<c10::IValue> args;
  const c10::FunctionSchema& schema = op.schema();

  bool writes(size_t arg) const {
    const auto* alias = schema.arguments()[arg].alias_info();
    // these two do not say that they change their running statistics
    const auto& name = schema.name();
    if ((arg == 3 || arg == 4) && (name == "aten::native_batch_norm" || name == "aten::_native_batch_norm_legit"))
      return true;
    return alias && alias->isWrite();
  }
  bool is_out(size_t arg) const { return schema.arguments()[arg].is_out(); }

  void ranges(std::vector<Range>& reads, std::vector<Range>& changed) const {
    for (size_t i = 0; i < args.size(); ++i)
      each_tensor(args[i], [&](const Tensor& t) {
        if (on_device(t)) (writes(i) ? changed : reads).push_back(range_of(t));
      });
  }
  // The argument that a return value is, by the schema.
  const c10::IValue* returned(size_t i) const {
    const auto* alias = schema.returns()[i].alias_info();
    if (!alias) return nullptr;
    for (size_t a = 0; a < args.size(); ++a) {
      const auto* other = schema.arguments()[a].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) return &args[a];
    }
    return nullptr;
  }
};

struct Shape {
  bool defined;
  std::vector<int64_t> sizes, strides;
  ScalarType dtype;
};
struct Answer {
  bool list;
  std::vector<Shape> shapes;
};
using Answers = std::shared_ptr<const std::vector<Answer>>;

// All that a meta kernel may look at, as a key; none where an argument is of a kind that is not known here.
std::optional<std::string> key_of(const Call& call) {
  std::string key;
  std::vector<const c10::TensorImpl*> seen;
  const auto add = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  const auto add_list = [&](const auto& list) {
    add(list.size());
    for (const auto& one : list) add(one);
  };
  add(&call.op.schema());
  add(at::get_default_dtype().id());
  for (const auto& arg : call.args) {
    if (arg.isTensor() || arg.isTensorList() || arg.isOptionalTensorList()) {
      key += 'T';
      each_tensor(arg, [&](const Tensor& t) {
        key += !t.defined() ? 'u' : t.unsafeGetTensorImpl()->is_wrapped_number() ? 'n' : 't';
        if (!t.defined()) return;
        add(t.scalar_type());
        add_list(t.sizes());
        add_list(t.strides());
        const auto known = std::find(seen.begin(), seen.end(), t.unsafeGetTensorImpl());
        add(known - seen.begin());
        if (known == seen.end()) seen.push_back(t.unsafeGetTensorImpl());
      });
      if (arg.isOptionalTensorList())
        for (const auto& t : arg.toOptionalTensorVector()) key += t.has_value() ? 'y' : 'n';
    } else if (arg.isNone()) {
      key += 'N';
    } else if (arg.isInt()) {
      key += 'i', add(arg.toInt());
    } else if (arg.isDouble()) {
      key += 'd', add(arg.toDouble());
    } else if (arg.isBool()) {
      key += arg.toBool() ? '1' : '0';
    } else if (arg.isIntList()) {
      key += 'I', add_list(arg.toIntVector());
    } else if (arg.isDoubleList()) {
      key += 'D', add_list(arg.toDoubleVector());
    } else if (arg.isBoolList()) {
      key += 'B';
      for (bool one : arg.toBoolList()) key += one ? '1' : '0';
      key += '.';
    } else if (arg.isString()) {
      key += arg.toStringRef() + '.';
    } else if (arg.isGenerator() || arg.isDevice()) {
      key += 'G';
    } else {
      return std::nullopt;
    }
  }
  return key;
}

// What the operator's meta kernel says that it gives, or what its arguments become; none where that is not known.
Answers shapes_of(const Call& call) {
  static std::unordered_map<std::string, Answers> known;
  const auto key = key_of(call);
  if (key) {
    Guarded guard(queues().lock);
    if (auto found = known.find(*key); found != known.end()) return found->second;
  }
  std::shared_ptr<std::vector<Answer>> answers;
  if (call.op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) {
    MetaTwins meta;
    Stack stack;
    for (const auto& arg : call.args)
      stack.push_back(arg.isGenerator() ? c10::IValue() : replaced(arg, meta, at::kMeta));
    try {
      call.op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack);
      answers = std::make_shared<std::vector<Answer>>();
    } catch (const c10::NotImplementedError&) {
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception&) {  // of a meta kernel in Python, which may only not know
    }
    for (size_t i = 0; answers && i < stack.size(); ++i) {
      const auto* same = call.returned(i);
      const auto made = same ? replaced(*same, meta, at::kMeta) : stack[i];
      auto& answer = answers->emplace_back(Answer{made.isTensorList(), {}});
      each_tensor(made, [&](const Tensor& t) {
        if (t.defined()) answer.shapes.push_back({true, t.sizes().vec(), t.strides().vec(), t.scalar_type()});
        else answer.shapes.push_back({false, {}, {}, ScalarType::Undefined});
      });
    }
  }
  if (key) {
    Guarded guard(queues().lock);
    known.emplace(*key, answers);
  }
  return answers;
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory(), DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor device_empty(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype) {
  return empty_strided(size, stride, dtype, {}, {}, {});
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto fresh = memory().allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept) memory().copy_data(fresh.get(), storage.data(), kept);
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(),
                                                        self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage(), bytes);
  return self;
}

void queue_bytes(void* to, const void* from, size_t bytes, bool from_host, bool to_host,
                 std::shared_ptr<std::vector<char>> staged) {
  const auto a = reinterpret_cast<uintptr_t>(from), b = reinterpret_cast<uintptr_t>(to);
  const bool reads = !staged, writes = !to_host || pinned().holds(to);
  queues().put(
      current_stream, Kind::Copy, from_host ? "a copy to the device" : "a copy to the host",
      [=] { std::memcpy(to, staged ? staged->data() : from, bytes); },
      reads ? std::vector<Range>{{a, a + bytes}} : std::vector<Range>{},
      writes ? std::vector<Range>{{b, b + bytes}} : std::vector<Range>{});
  if (!staged && from_host) pinned().used(from, current_stream);
  if (to_host) pinned().used(to, current_stream);
}

void host_reads(const Tensor& t) {
  if (t.numel() && pinned().holds(t.const_data_ptr())) queues().host_touches(range_of(t), false, "a reading");
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense();
}

// Copies are queued. The caller waits where he did not ask for `non_blocking`, or the host's end is not registered.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  Plainly plainly;
  Guarded guard(queues().lock);
  const Tensor from = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (on_device(from) && on_device(target)) {
    RawTwins raw;
    queues().put(current_stream, Kind::Kernel, "aten::copy_", [a = raw(from), b = raw(target)] { b.copy_(a); },
                 {range_of(from)}, {range_of(target)});
    return target;
  }
  const bool out = on_device(from);
  if (!same_layout(from, target)) {  // by way of a tensor of the right form on the device or on the host
    if (out) {
      auto there = device_empty(target.sizes(), c10::contiguous_strides(target.sizes()), from.scalar_type());
      copy_from(from, there, true);
      auto here = at::empty(target.sizes(), from.options().device(at::kCPU));
      copy_from(there, here, false);
      if (pinned().holds(target.const_data_ptr())) queues().host_touches(range_of(target), true, "a copy by the host");
      target.copy_(here);
    } else {
      host_reads(from);
      auto here = at::empty(target.sizes(), from.options().dtype(target.scalar_type()).pinned_memory(false));
      here.copy_(from);
      auto there = device_empty(here.sizes(), here.strides(), here.scalar_type());
      copy_from(here, there, non_blocking);
      copy_from(there, target, true);
    }
    return target;
  }
  const size_t bytes = from.numel() * from.element_size();
  const void* a = from.const_data_ptr();
  void* b = target.mutable_data_ptr();
  const bool registered = pinned().holds(out ? b : a);
  std::shared_ptr<std::vector<char>> staged;
  if (!out && !registered)
    staged = std::make_shared<std::vector<char>>(static_cast<const char*>(a), static_cast<const char*>(a) + bytes);
  queue_bytes(b, a, bytes, !out, out, staged);
  if (!non_blocking || (out && !registered)) queues().synchronize(current_stream);
  return target;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Tensor here = at::detail::empty_cpu(self.sizes(), self.scalar_type());
  copy_from(self, here, false);
  Plainly plainly;
  return at::_local_scalar_dense(here);
}

// Queue the CPU kernel of a call, and what is to be done with its results; these end up in `made`.
void put_call(const Call& call, const char* name, std::function<void(Stack&)> then, RawTwins& raw, bool fresh_outs,
              const std::vector<std::vector<Tensor>>& made) {
  auto stack = std::make_shared<Stack>();
  int generator = -1;
  for (size_t i = 0; i < call.args.size(); ++i) {
    if (fresh_outs && call.is_out(i) && call.args[i].isTensor())
      stack->push_back(at::empty({0}, call.args[i].toTensor().options().device(at::kCPU)));
    else
      stack->push_back(replaced(call.args[i], raw, at::kCPU));
    if (call.schema.arguments()[i].type()->str().find("Generator") == 0) generator = static_cast<int>(i);
  }
  uint64_t seed = 0;
  if (generator >= 0) {
    auto given = call.args[generator].isNone() ? default_generator() : call.args[generator].toGenerator();
    TORCH_CHECK(given.device().type() == kType, "Expected a generator of the device, got one of ", given.device());
    std::lock_guard<std::mutex> settled(given.mutex());
    seed = given.get<Generator>()->next();
  }
  std::vector<Range> reads, writes;
  call.ranges(reads, writes);
  for (const auto& some : made)
    for (const auto& t : some)
      if (on_device(t)) writes.push_back(range_of(t));
  queues().put(
      current_stream, Kind::Kernel, name,
      [op = call.op, stack, generator, seed, then = std::move(then)] {
        if (generator >= 0) (*stack)[generator] = at::detail::createCPUGenerator(seed);
        // torch 2.11 answers for operators with several `out` with references to these, which it lets go of before
        const Stack held = *stack;
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack.get());
        then(*stack);
      },
      reads, writes);
}

// Run at once: what an operator answers depends on values, or nobody knows its shapes beforehand.
void run_now(const Call& call, const char* name, Stack* stack) {
  RawTwins raw;
  auto results = std::make_shared<Stack>();
  Stack answers;
  {
    Guarded guard(queues().lock);
    ++queues().counts[c10::str("waited for ", name)];
    put_call(call, name, [results](Stack& made) { *results = made; }, raw, true, {});
    queues().synchronize(current_stream);
  }
  const auto bring = [](const Tensor& made) {
    if (!made.defined()) return made;
    auto there = device_empty(made.sizes(), made.strides(), made.scalar_type());
    copy_from(made, there, true);
    return there;
  };
  TORCH_CHECK(results->size() == call.schema.returns().size(), name, " gave nothing");
  for (size_t i = 0; i < results->size(); ++i) {
    const auto* same = call.returned(i);
    if (same && same->isTensor()) {
      const auto& made = (*results)[i].toTensor();
      const auto& out = same->toTensor();
      if (made.const_data_ptr() != out.const_data_ptr()) {
        resize_(out, made.sizes(), {});
        copy_from(made, out, true);
      }
      answers.push_back(*same);
    } else {
      answers.push_back(same ? *same : replaced((*results)[i], bring, kType));
    }
  }
  torch::jit::drop(*stack, call.args.size());
  for (auto& answer : answers) stack->push_back(std::move(answer));
}

// Every operator that has no rule of its own: shapes from its meta kernel, its CPU kernel queued.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Call call{op, torch::jit::last(*stack, schema.arguments().size())};
  const char* name;
  {
    Guarded guard(queues().lock);
    name = interned(schema.name());
  }
  Plainly plainly;
  bool later = true, in_place = !schema.returns().empty();
  for (const auto& r : schema.returns()) {
    const auto kind = r.type()->str();
    later &= kind == "Tensor" || kind == "Tensor[]";
    in_place &= r.alias_info() && r.alias_info()->isWrite();
    TORCH_CHECK(!r.alias_info() || r.alias_info()->isWrite(), name, " is a view that this device does not know");
  }
  for (size_t i = 0; i < call.args.size(); ++i) {
    in_place &= !call.is_out(i);
    if (call.writes(i))
      each_tensor(call.args[i], [&](const Tensor& t) {
        TORCH_CHECK(!t.defined() || on_device(t), name, " would write to a tensor on ", t.device());
      });
  }
  TORCH_CHECK(schema.name() != "aten::_fused_dropout", name, " draws random numbers without a generator");
  const auto answer = later ? shapes_of(call) : nullptr;
  if (!answer && !(later && in_place)) return run_now(call, name, stack);

  RawTwins raw;
  Stack answers;
  std::vector<std::vector<Tensor>> made(schema.returns().size());  // empty where the answer is an argument
  for (size_t i = 0; i < made.size(); ++i) {
    if (const auto* same = call.returned(i)) {
      if (answer && same->isTensor() && same->toTensor().sizes() != (*answer)[i].shapes[0].sizes)
        resize_(same->toTensor(), (*answer)[i].shapes[0].sizes, {});
      answers.push_back(*same);
      continue;
    }
    for (const auto& shape : (*answer)[i].shapes)
      made[i].push_back(shape.defined ? device_empty(shape.sizes, shape.strides, shape.dtype) : Tensor());
    if ((*answer)[i].list) answers.push_back(c10::List<Tensor>(made[i]));
    else answers.push_back(made[i][0]);
  }
  Guarded guard(queues().lock);
  std::vector<std::vector<Tensor>> into;
  for (const auto& some : made) {
    into.emplace_back();
    for (const auto& t : some) into.back().push_back(raw(t));
  }
  put_call(
      call, name,
      [into, name](Stack& results) {
        for (size_t i = 0; i < into.size(); ++i) {
          size_t n = 0;
          if (into[i].empty()) continue;
          each_tensor(results[i], [&](const Tensor& result) {
            const auto& target = into[i].at(n++);
            if (!target.defined() || !result.defined()) return;
            // in evaluation the CPU gives no statistics, where other devices give ones that nobody reads
            if (!result.numel() && std::strstr(name, "batch_norm")) return;
            TORCH_CHECK(target.sizes() == result.sizes() && target.scalar_type() == result.scalar_type(), name,
                        " gave ", result.sizes(), " ", result.scalar_type(), " where its meta kernel said ",
                        target.sizes(), " ", target.scalar_type());
            target.copy_(result);
          });
        }
        results.clear();
      },
      raw, false, made);
  torch::jit::drop(*stack, call.args.size());
  for (auto& answer : answers) stack->push_back(std::move(answer));
}

// As CUDA's: the kernels below draw from the generator, one after the other.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!p || !train.value_or(true) || !input.numel()) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}
Tensor& set_nothing(Tensor& self) {
  return set_part(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, memory().allocate(0), &memory(), true), 0, {0},
                  {});
}
void record_stream(Tensor& self, at::Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

// The fused kernel of the CPU where it knows how.
int64_t sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                   bool, std::optional<double>, bool shared_heads) {
  const bool fused = !dropout && q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.numel() && k.numel() &&
      (q.size(1) == k.size(1) || (shared_heads && q.size(1) % k.size(1) == 0)) && k.size(1) == v.size(1) &&
      q.size(0) == k.size(0) && q.size(-1) == v.size(-1) &&
      (!mask || (!mask->requires_grad() && mask->dim() <= 4));
  return static_cast<int64_t>(fused ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

// Of integers too, as CUDA's: by it tokens are counted in mixtures of experts. The CPU has that of floats alone.
void histc(const c10::OperatorHandle& op, Stack* stack) {
  c10::IValue& self = (*stack)[stack->size() - 4];
  const auto type = self.toTensor().scalar_type();
  const bool counts = at::isIntegralType(type, /*includeBool=*/false);
  if (counts) self = self.toTensor().to(at::kDouble);
  fallback(op, stack);
  if (counts) stack->back() = stack->back().toTensor().to(type);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_dropout", native_dropout);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  // these would ask for kernels of the device's own otherwise, or be put together from others than the CPU's
  for (const char* name : {"convolution", "convolution_backward", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// --- autocast: CUDA's lists ----------------------------------------------------------------------------------------

enum class Cast { Lower, Full, FullByType, Widest };

template <Cast cast>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const auto eligible = [](const Tensor& t) {
    return on_device(t) && t.is_floating_point() && t.scalar_type() != at::kDouble;
  };
  const auto lower = at::autocast::get_autocast_dtype(kType);
  bool full = cast == Cast::Full;
  for (size_t i = 0; cast == Cast::Widest && i < arguments.size(); ++i)
    each_tensor((*stack)[first + i], [&](const Tensor& t) { full |= eligible(t) && t.scalar_type() == at::kFloat; });
  const bool by_type = cast == Cast::FullByType && eligible((*stack)[first].toTensor());
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& arg = (*stack)[first + i];
    if (by_type && arguments[i].name() == "dtype" && arg.isNone()) arg = at::kFloat;
    if (cast != Cast::FullByType)
      arg = replaced(
          arg, [&](const Tensor& t) { return at::autocast::cached_cast(full ? at::kFloat : lower, t, kType); }, kType);
  }
  op.callBoxed(stack);
}

template <Cast cast>
void cast_each(torch::Library& m, std::initializer_list<const char*> names) {
  for (const char* name : names) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<cast>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  cast_each<Cast::Lower>(
      m, {"_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
          "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr",
          "matmul", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
          "linalg_vecdot", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention"});
  cast_each<Cast::Full>(
      m, {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
          "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
          "native_layer_norm", "rms_norm", "group_norm", "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity",
          "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
          "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "soft_margin_loss",
          "triplet_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
          "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
          "upsample_trilinear3d", "upsample_bicubic2d"});
  cast_each<Cast::FullByType>(
      m, {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
          "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"});
  cast_each<Cast::Widest>(m, {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
                              "index_put", "tensordot", "scatter_add"});
}

// --- what PyTorch asks of an accelerator ---------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool = false) const override {
    static std::atomic<unsigned> next{0};
    return stream(1 + static_cast<int>(next++ % (kStreams - 1)));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return getStreamFromGlobalPool(device); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(std::exchange(current_stream, static_cast<int>(to.id())));
  }
  bool queryStream(const c10::Stream& s) const override {
    Guarded guard(queues().lock);
    const int id = static_cast<int>(s.id());
    return queues().executed(id, queues().issued(id));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Guarded guard(queues().lock);
    queues().synchronize(static_cast<int>(s.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Guarded guard(queues().lock);
    queues().synchronize();
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Guarded guard(queues().lock);
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark = queues().record(static_cast<int>(s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    Guarded guard(queues().lock);
    if (event) queues().wait(static_cast<int>(s.id()), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    Guarded guard(queues().lock);
    return !event || queues().query(*static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    Guarded guard(queues().lock);
    if (event) queues().synchronize(*static_cast<Event*>(event)->mark);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto &a = *static_cast<Event*>(first)->mark, &b = *static_cast<Event*>(second)->mark;
    TORCH_CHECK(a.done && b.done, "both events must have come before their times can be compared");
    return std::chrono::duration<double, std::milli>(b.when - a.when).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& s) const override {
    memory().recordStream(pointer, s);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return opened; }
  void init() const override { open_device(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return pinned().holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
  c10::SetAllocator(kType, &memory());
  at::setHostAllocator(kType, &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_schedule", [](const std::string& name, uint64_t seed) {
    static const std::map<std::string, Schedule> names{{"eager", Schedule::Eager},
                                                       {"lazy", Schedule::Lazy},
                                                       {"random", Schedule::Random},
                                                       {"compute-late", Schedule::ComputeLate},
                                                       {"copies-late", Schedule::CopiesLate}};
    Guarded guard(queues().lock);
    queues().schedule = names.at(name);
    queues().dice.seed(seed);
  });
  m.def("races", [] {
    Guarded guard(queues().lock);
    return queues().watch.races;
  });
  m.def("clear_races", [] {
    Guarded guard(queues().lock);
    queues().watch.clear();
  });
  m.def("counts", [] {
    Guarded guard(queues().lock);
    return queues().counts;
  });
  m.def("host_touches", [](uintptr_t start, size_t bytes, bool writes) {
    Guarded guard(queues().lock);
    queues().host_touches({start, start + bytes}, writes, writes ? "a writing" : "a reading");
  });
  m.def("register_host", [](uintptr_t start, size_t bytes) { pinned().add(start, bytes); });
  m.def("unregister_host", [](uintptr_t start) { pinned().remove(start); });
  m.def("total_bytes", [] { return memory().total; });
  m.def("set_total_bytes", [](size_t bytes) {
    Guarded guard(queues().lock);
    memory().total = bytes;
  });
  m.def("limit_bytes", [] { return memory().limit; });
  m.def("set_limit_bytes", [](size_t bytes) {
    Guarded guard(queues().lock);
    memory().limit = bytes;
  });
  m.def("seed", [](uint64_t seed) {
    std::lock_guard<std::mutex> settled(default_generator().unsafeGetGeneratorImpl()->mutex_);
    default_generator().get<Generator>()->set_current_seed(seed);
  });
  m.def("get_random", [] {
    auto* generator = default_generator().get<Generator>();
    return std::make_pair(generator->current_seed(), generator->get_offset());
  });
  m.def("set_random", [](uint64_t seed, uint64_t offset) {
    std::lock_guard<std::mutex> settled(default_generator().unsafeGetGeneratorImpl()->mutex_);
    auto* generator = default_generator().get<Generator>();
    generator->set_current_seed(seed);
    generator->set_offset(offset);
  });
  m.def("is_initialized", [] { return opened && !forked; });
  m.def("is_in_bad_fork", [] { return forked; });
  m.def("init", [] { open_device(); });
}
