// Reads a program (see tests/unit/memory/allocator_programs.py), runs it on PyTorch's own CUDA caching allocator
// and prints what that did: errors, actions, counters, layout.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*func)(DeviceIndex));
}
extern "C" {
void fake_finish(cudaStream_t);
extern uint64_t fake_total_bytes, fake_other_bytes;
}

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::TraceEntry;

static cudaStream_t handle(int number) {
  return number ? reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(0x100000 + (number << 4))) : nullptr;
}

static const char *name(TraceEntry::Action action) {
  static const char *names[] = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                                "segment_map", "segment_unmap", "snapshot", "oom"};
  return names[action];
}

static void print(const std::string &name, const Stat &stat) {
  std::cout << "stat " << name << " " << stat.current << " " << stat.peak << " " << stat.allocated << " "
            << stat.freed << "\n";
}

static void print(const std::string &name, const StatArray &stats) {
  static const char *pools[] = {"all", "small_pool", "large_pool"};
  for (int i = 0; i < 3; i++) print(name + "." + pools[i], stats[i]);
}

class Player {
 public:
  void play(const std::string &line) {
    std::istringstream in(line);
    std::string command, id;
    in >> command;
    auto *allocator = caching::get();
    if (command == "m") {
      size_t size;
      int stream;
      in >> id >> size >> stream;
      try {
        pointers_[id] = allocator->raw_alloc_with_stream(size, handle(stream));
      } catch (const c10::Error &error) {
        std::cout << "oom " << id << " " << error.what_without_backtrace() << "\n";
      }
    } else if (command == "f") {
      in >> id;
      if (auto found = pointers_.find(id); found != pointers_.end()) {
        allocator->raw_delete(found->second);
        pointers_.erase(found);
      }
    } else if (command == "r") {
      int stream;
      in >> id >> stream;
      if (auto found = pointers_.find(id); found != pointers_.end()) {
        c10::DataPtr data(found->second, found->second, allocator->raw_deleter(), c10::Device(c10::kCUDA, 0));
        allocator->recordStream(data, c10::cuda::getStreamFromExternal(handle(stream), 0));
        data.release_context();
      }
    } else if (command == "a") {
      int stream;
      in >> stream;
      fake_finish(handle(stream));
    } else if (command == "e") {
      allocator->emptyCache({0, 0});
    } else if (command == "F") {
      double fraction;
      in >> fraction;
      allocator->setMemoryFraction(fraction, 0);
    } else if (command == "B" || command == "E") {
      unsigned long long pool;
      in >> pool;
      if (command == "B")
        allocator->beginAllocateToPool(0, {0, pool}, [](cudaStream_t) { return true; });
      else
        allocator->endAllocateToPool(0, {0, pool});
    } else if (command == "P") {
      allocator->resetPeakStats(0);
    } else if (command == "A") {
      allocator->resetAccumulatedStats(0);
    }
  }

 private:
  std::map<std::string, void *> pointers_;
};

static void report() {
  auto snapshot = caching::get()->snapshot();
  for (auto &entry : snapshot.device_traces[0])
    std::cout << "trace " << name(entry.action_) << " " << entry.addr_ << " " << entry.size_ << " "
              << reinterpret_cast<uintptr_t>(entry.stream_) << "\n";
  auto stats = caching::get()->getDeviceStats(0);
  print("allocation", stats.allocation);
  print("segment", stats.segment);
  print("active", stats.active);
  print("inactive_split", stats.inactive_split);
  print("allocated_bytes", stats.allocated_bytes);
  print("reserved_bytes", stats.reserved_bytes);
  print("active_bytes", stats.active_bytes);
  print("inactive_split_bytes", stats.inactive_split_bytes);
  print("requested_bytes", stats.requested_bytes);
  print("oversize_allocations", stats.oversize_allocations);
  print("oversize_segments", stats.oversize_segments);
  std::cout << "count num_alloc_retries " << stats.num_alloc_retries << "\ncount num_ooms " << stats.num_ooms
            << "\ncount num_sync_all_streams " << stats.num_sync_all_streams << "\ncount num_device_alloc "
            << stats.num_device_alloc << "\ncount num_device_free " << stats.num_device_free
            << "\ncount max_split_size " << stats.max_split_size << "\n";
  for (auto &segment : snapshot.segments) {
    std::cout << "segment " << segment.address << " " << segment.total_size << " " << segment.allocated_size << " "
              << segment.active_size << " " << segment.requested_size << " "
              << reinterpret_cast<uintptr_t>(segment.stream) << " " << segment.is_large << " "
              << segment.is_expandable << "\n";
    for (auto &block : segment.blocks)
      std::cout << "block " << block.size << " " << block.requested_size << " " << block.allocated << " "
                << block.active << "\n";
  }
}

int main() {
  fake_total_bytes = std::strtoull(std::getenv("FAKE_TOTAL_BYTES"), nullptr, 10);
  fake_other_bytes = std::strtoull(std::getenv("FAKE_OTHER_BYTES"), nullptr, 10);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  caching::get()->init(1);
  caching::get()->recordHistory(true, nullptr, 100000000, caching::RecordContext::NEVER, true, {});
  Player player;
  for (std::string line; std::getline(std::cin, line);) player.play(line);
  report();
  std::cout.flush();
  std::_Exit(0);
}
