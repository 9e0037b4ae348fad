// A CPU allocator for torch that counts: every request passes through it, whichever thread or library makes it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, long long> sizes;
long long live = 0, peak = 0;
c10::Allocator* torch_allocator = nullptr;

void release(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(mutex);
    live -= sizes[data];
    sizes.erase(data);
  }
  torch_allocator->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = torch_allocator->raw_allocate(bytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[data] = static_cast<long long>(bytes);
      live += static_cast<long long>(bytes);
      if (live > peak) peak = live;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Counting counting;

}  // namespace

extern "C" {

void install() {
  if (torch_allocator == nullptr) torch_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, 255);
}

// What was allocated meanwhile still finds its way back.
void uninstall() { c10::SetCPUAllocator(torch_allocator, 255); }

long long live_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  return live;
}

// The highest point since the last call, or since the beginning.
long long take_peak_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  long long highest = peak;
  peak = live;
  return highest;
}
}
